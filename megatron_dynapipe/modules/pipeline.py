"""Training steps of a divided model: one object, one call per iteration.

part = split_model(model, example_batch, split_points=["h.3"])
pipeline = Pipeline(part, torch.optim.AdamW(part.parameters()), loss_fn)
for batch in batches:
    loss, overflow = pipeline.step(batch)
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.amp.grad_scaler import GradScaler

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part, checksum, signature
from megatron_dynapipe.modules.checkpoint import load_checkpoint, save_checkpoint
from megatron_dynapipe.modules.gradients import Gradients, LossScale
from megatron_dynapipe.modules.inputs import Batch, batch_rows, split_batch
from megatron_dynapipe.modules.loader import ModulePlanner
from megatron_dynapipe.modules.ranks import Failures, start_agreement
from megatron_dynapipe.modules.runner import LossFunction, ModuleRunner, ModuleStage
from megatron_dynapipe.modules.steps import Plan, StepOutputs, StepResult, StepWork, planned_instructions, step_result
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.runtime import PendingTotals, Step, StepTotals, Trace
from megatron_dynapipe.runtime.control_group import StepAgreement
from megatron_dynapipe.runtime.shared_weights import SharedWeights

_COMPARED_STEPS, _COMPARED_EVERY = 100, 10
"""The values of batches are compared among ranks in so many first steps, then in each step of that many."""
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Pipeline:
    """One rank's part in training steps. Every rank makes it at the same point: it makes process groups.

    Args:
        part: from `split_model`, or a `Stage`.
        optimizer: over `part.parameters()`; None leaves the gradients where they are.
        loss_fn: `loss_fn(output, batch) → (sum, count)`, called on the last stage with each micro-batch.
        planner: divides what `step` is given into micro-batches and orders their passes; see `ModulePlanner.share`.
        micro_batches: how many `step` makes of a batch without a planner; by default as many as there are stages.
        micro_batch_size: or of how many samples at most.
        precision: "fp32", or autocast to "bf16" or "fp16", with weights in fp32 and fp16's loss scaled.
        max_norm: gradients are scaled so that their norm over all stages is at most this.
        schedule: order of passes without a plan: "1f1b", "gpipe" or "adaptive".
        tensor_shapes: shapes of the tensors at every boundary of a `Stage`, or a function from a micro-batch to them;
            without them, stages exchange theirs once for every new shape of a micro-batch.
        loss_scale: of fp16; by default `torch.amp.GradScaler("cpu")`, whose state lives on the host.
        timeout_s: deadline of every transfer.

    Attributes:
        part: as given.
        loss_scale: of fp16; None without.
        norm: of the last step's gradients before clipping; None where nothing asked for it.
        trace: when the last iteration's instructions ran on this rank.
    """

    def __init__(
        self,
        part: Part,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: LossFunction,
        *,
        planner: ModulePlanner | None = None,
        micro_batches: int | None = None,
        micro_batch_size: int | None = None,
        precision: str = "fp32",
        max_norm: float | None = None,
        schedule: str = "1f1b",
        tensor_shapes: Any = None,
        loss_scale: GradScaler | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"expected a precision among {', '.join(PRECISIONS)}, got {precision!r}")
        if micro_batches is not None and micro_batch_size is not None:
            raise ConfigError("expected a number of micro-batches or their size, got both")
        self._planner, self._micro_batches, self._micro_batch_size = planner, micro_batches, micro_batch_size
        if tensor_shapes is not None:
            part.use_shapes(tensor_shapes)
        self.loss_scale = (loss_scale or GradScaler("cpu")) if precision == "fp16" else None
        self.part, self._optimizer, self._loss_fn, self._autocast = part, optimizer, loss_fn, PRECISIONS[precision]
        self._max_norm, self._schedule = max_norm, schedule
        self._scale = None if self.loss_scale is None else LossScale(self.loss_scale)
        self._steps = 0
        self.norm: float | None = None
        self.trace: Trace | None = None
        ranks, backend, copies = part.ranks, part.backend, part.weight_copies()
        shared = SharedWeights(copies, ranks.pipelines, backend=backend, timeout_s=timeout_s) if copies else None
        replicas, stages = ranks.group_of_replicas(backend), ranks.group_of_stages(backend)
        self._gradients = Gradients(part, part.device, replicas=replicas, stages=stages, shared=shared)
        transport, channels = part.connect(timeout_s)
        groups = [ranks.control.group, *channels, replicas, stages, *(shared.groups if shared else ())]
        self._failures = Failures(ranks.control, [group for group in groups if group is not None])
        self._runner = ModuleRunner(
            transport,
            part.device,
            stage=part.stage,
            stages=part.stages,
            chunks=part.chunks,
            dtype=torch.float32,
            deadline_s=timeout_s,
            control=ranks.control,
        )

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.part.stage

    @property
    def replica(self) -> int:
        """The replica that this rank is in."""
        return self.part.replica

    @overload
    def step(self, batch: Any, *, return_outputs: Literal[False] = False) -> StepResult: ...
    @overload
    def step(self, batch: Any, *, return_outputs: Literal[True]) -> StepOutputs: ...
    def step(self, batch: Any, *, return_outputs: bool = False) -> StepResult | StepOutputs:
        """Run a batch forward and backward, reduce the gradients and update the weights.

        Args:
            batch: this replica's share: the same on every rank of its pipeline. A dict by names of the model's
                arguments, or a tuple or tensor; labels that only the loss reads come with it.
            return_outputs: return a `StepOutputs` instead of a `StepResult`.

        Raises:
            DataError, ConfigError: on every rank alike: a key that the model does not know, no samples, tensors
                inside lists or dicts, a batch that differs among the ranks of a pipeline (values on the host are
                compared in the first steps and then in some), a loss without a graph, a count that cannot be one.
        """
        return self._train(lambda: self._divided(batch), keep_outputs=return_outputs)

    @overload
    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: Literal[False] = False
    ) -> StepResult: ...
    @overload
    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: Literal[True]
    ) -> StepOutputs: ...
    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: bool = False
    ) -> StepResult | StepOutputs:
        """`step` with micro-batches as they are, in the order of passes that a plan says.

        Args:
            micro_batches: of this replica; it may have none.
            plan: of this iteration, as `DynaPipeDataLoader` yields it; None runs them in this pipeline's schedule.
            return_outputs: as in `step`.
        """
        return self._train(lambda: self._given(micro_batches, plan), keep_outputs=return_outputs)

    @overload
    def evaluate(
        self,
        batch: Any = None,
        *,
        micro_batches: Sequence[Any] | None = None,
        return_outputs: Literal[False] = False,
    ) -> StepResult: ...
    @overload
    def evaluate(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, return_outputs: Literal[True]
    ) -> StepOutputs: ...
    def evaluate(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, return_outputs: bool = False
    ) -> StepResult | StepOutputs:
        """The loss of a batch, or of micro-batches, without gradients; the part is in evaluation mode meanwhile."""

        def work() -> StepWork:
            return self._divided(batch, forward_only=True) if micro_batches is None else self._given(micro_batches)

        return self._evaluate(work, keep_outputs=return_outputs)

    def save(self, path: str | Path) -> None:
        """Write weights, optimizer state and loss scale into a folder; every rank calls it."""
        save_checkpoint(Path(path), self.part, self._optimizer, self._extra())

    def load(self, path: str | Path) -> None:
        """Go on from a folder that `save` wrote, under whatever number of stages and replicas.

        Raises:
            DataError: there is no such checkpoint, or it lacks a weight.
        """
        extra = load_checkpoint(Path(path), self.part, self._optimizer, self._extra())
        if self._scale is not None:
            self._scale.load(extra)

    def _extra(self) -> dict[str, float]:
        return {} if self._scale is None else self._scale.state()

    def _divided(self, batch: Any, *, forward_only: bool = False) -> StepWork:
        """A replica's batch as micro-batches."""
        named = self.part.inputs.name(batch)
        if self._planner is not None:
            return StepWork(*self._planner.share(named, forward_only=forward_only))
        count = self._micro_batches or self.part.stages * self.part.chunks
        if self._micro_batch_size is not None:
            count = -(-batch_rows(named) // self._micro_batch_size)
        return StepWork(split_batch(named, count), None)

    def _given(self, micro_batches: Sequence[Any], plan: Plan | None = None) -> StepWork:
        return StepWork([self.part.inputs.name(batch) for batch in micro_batches], plan)

    def _train(self, work: Callable[[], StepWork], *, keep_outputs: bool) -> StepResult | StepOutputs:
        """Train on micro-batches; all ranks raise what making them raises on one."""
        self._gradients.zero()
        scale = None if self._scale is None else self._scale.value

        def finish(totals: PendingTotals) -> None:
            _, count = totals.wait()
            self._gradients.reduce((count or 1.0) * (scale or 1.0))

        with self._failures.named():
            totals, stage = self._run(work, scale=scale, keep_outputs=keep_outputs, finish=finish)
            overflow = self._update()
        return step_result(totals, stage, overflow=overflow, keep_outputs=keep_outputs)

    def _evaluate(self, work: Callable[[], StepWork], *, keep_outputs: bool) -> StepResult | StepOutputs:
        """Run micro-batches forward, with the part in evaluation mode meanwhile."""
        training = self.part.training
        self.part.eval()
        try:
            with self._failures.named():
                totals, stage = self._run(work, forward_only=True, keep_outputs=keep_outputs)
        finally:
            self.part.train(training)
        return step_result(totals, stage, overflow=False, keep_outputs=keep_outputs)

    def _run(
        self,
        work: Callable[[], StepWork],
        *,
        scale: float | None = None,
        forward_only: bool = False,
        keep_outputs: bool = False,
        finish: Callable[[PendingTotals], None] = lambda _: None,
    ) -> tuple[StepTotals, ModuleStage]:
        """Run micro-batches through this rank's virtual stages; gradients are added to the parameters'."""
        agreement, made, planned = self._begin(work)
        specialized = self.part.specialize(made.micro_batches, self._autocast)
        stage = ModuleStage(
            self._runner,
            [self.part.share(batch) for batch in made.micro_batches],
            specialized,
            self._loss_fn,
            autocast=self._autocast,
            scale=scale,
            labels=self.part.inputs.labels if keep_outputs else None,
        )
        plan = self._runner.fill_list(specialized, self._schedule, planned=planned, forward_only=forward_only)
        self.part.expect(plan, made.micro_batches)
        step = Step(
            plan=plan,
            model=stage,
            dtypes=stage.dtypes,
            agreement=agreement,
            forward_only=forward_only,
            finish=finish,
        )
        totals = self._runner.run(step)
        self.trace = totals.trace
        return totals, stage

    def _begin(self, work: Callable[[], StepWork]) -> tuple[StepAgreement, StepWork, Sequence[Instruction] | None]:
        """The micro-batches, and the instructions of their plan, if there is one.

        What is new to a rank of a pipeline is new to all of them, and learned by all together. Else the first passes
        run while ranks still agree; the first transfer waits for it.
        """
        part, error = self.part, None
        made, planned, new = StepWork((), None), None, False
        try:
            made = work()
            planned = None if made.plan is None else planned_instructions(made.plan, part, len(made.micro_batches))
            new = not part.knows(made.micro_batches, self._autocast)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must raise too)
            error = raised
        plan = None if made.plan is None else (made.plan.iteration, made.plan.totals)
        agreement = start_agreement(
            part.ranks.control,
            error,
            repr([plan, part.state, *map(signature, made.micro_batches)]),
            "a replica's batch, its shapes, its values, its plan and the model's attributes",
            alike=part.ranks.alike,
            checksum=self._checksum(made.micro_batches),
            new=new,
            learn=partial(part.learn, made.micro_batches, self._autocast),
        )
        if error is not None or new:
            agreement.settle()
        return agreement, made, planned

    def _checksum(self, micro_batches: Sequence[Batch]) -> bytes:
        """Of the batch's values, in the first steps and then now and again: it takes 0.4 ms per megabyte."""
        self._steps += 1
        is_compared = self._steps <= _COMPARED_STEPS or self._steps % _COMPARED_EVERY == 0
        return checksum(micro_batches) if is_compared else bytes(4)

    def _update(self) -> bool:
        """Clip and update; whether gradients were not finite under a loss scale."""
        self.norm = None
        if self._max_norm is not None or self._scale is not None:
            self.norm = self._gradients.norm()
        overflow = self._scale is not None and self.norm is not None and not math.isfinite(self.norm)
        if self._scale is not None:
            self._scale.update(overflow=overflow)
        if overflow:
            return True
        if self._max_norm is not None and self.norm is not None:
            self._gradients.clip(self.norm, self._max_norm)
        if self._optimizer is not None:
            self._optimizer.step()
        return False
