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
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.amp.grad_scaler import GradScaler

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part, checksum, signature
from megatron_dynapipe.modules.checkpoint import load_checkpoint, save_checkpoint
from megatron_dynapipe.modules.gradients import Gradients, LossScale
from megatron_dynapipe.modules.inputs import Batch, batch_rows, split_batch
from megatron_dynapipe.modules.planner import ModulePlanner
from megatron_dynapipe.modules.ranks import start_agreement
from megatron_dynapipe.modules.runner import LossFunction, ModuleRunner, ModuleStage
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.iteration import IterationPlan, StageEntry
from megatron_dynapipe.runtime import PendingTotals, Step, StepTotals, TorchTransport, Trace
from megatron_dynapipe.runtime.control_group import StepAgreement
from megatron_dynapipe.runtime.process_groups import backend_of, make_groups, warm_up
from megatron_dynapipe.runtime.shared_weights import SharedWeights

Plan = IterationPlan | StageEntry
"""Gives the order in which passes run: a whole iteration's plan, or this rank's share of it."""

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_COMPARED_STEPS, _COMPARED_EVERY = 100, 10
"""The values of batches are compared among ranks in so many first steps, then in each step of that many."""


class _Work(NamedTuple):
    """Micro-batches by names of the model's arguments, and their plan, if there is one."""

    micro_batches: Sequence[Batch]
    plan: Plan | None


class StepResult(NamedTuple):
    """What a step came to, the same on every rank: `loss, overflow = pipeline.step(batch)`.

    Attributes:
        loss: sum over everything / count over everything: a float32 scalar without a graph, on the host.
        overflow: gradients were not finite (fp16), so that no rank changed its weights.
    """

    loss: torch.Tensor
    overflow: bool


class StepOutputs(NamedTuple):
    """A `StepResult` and, for each micro-batch, what the model returned and the batch's labels; both empty but on the
    last stage.
    """

    loss: torch.Tensor
    overflow: bool
    outputs: list[Any]
    labels: list[Batch]


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
        self.part, self._optimizer, self._planner = part, optimizer, planner
        self._micro_batches, self._micro_batch_size = micro_batches, micro_batch_size
        self._max_norm, self._schedule = max_norm, schedule
        self.loss_scale = (loss_scale or GradScaler("cpu")) if precision == "fp16" else None
        self._scale = None if self.loss_scale is None else LossScale(self.loss_scale)
        self._steps = 0
        self.norm: float | None = None
        self.trace: Trace | None = None
        if tensor_shapes is not None:
            part.use_shapes(tensor_shapes)
        self._loss_fn, self._autocast = loss_fn, PRECISIONS[precision]
        ranks, backend = part.ranks, backend_of(part.device)
        self._gradients = Gradients(
            part,
            part.device,
            replicas=ranks.group_of_replicas(backend),
            stages=ranks.group_of_stages(backend),
            shared=SharedWeights(part.weight_copies(), ranks.pipelines, backend=backend, timeout_s=timeout_s),
        )
        groups = make_groups(ranks.pipelines, chunks=part.chunks, backend=backend, timeout_s=timeout_s)
        assert groups is not None, "every rank is in a pipeline"
        warm_up(groups, part.device)
        self._runner = ModuleRunner(
            TorchTransport(groups.channels, groups.ranks, deadline_s=timeout_s),
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

        def work() -> _Work:
            return self._divided(batch, forward_only=True) if micro_batches is None else self._given(micro_batches)

        training = self.part.training
        self.part.eval()
        try:
            totals, stage = self._run(work, forward_only=True, keep_outputs=return_outputs)
        finally:
            self.part.train(training)
        return _result(totals, stage, overflow=False, keep_outputs=return_outputs)

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

    def _train(self, work: Callable[[], _Work], *, keep_outputs: bool) -> StepResult | StepOutputs:
        self._gradients.zero()
        scale = None if self._scale is None else self._scale.value

        def finish(totals: PendingTotals) -> None:
            _, count = totals.wait()
            self._gradients.reduce(max(count, 1.0) * (scale or 1.0))

        totals, stage = self._run(work, scale=scale, keep_outputs=keep_outputs, finish=finish)
        return _result(totals, stage, overflow=self._update(), keep_outputs=keep_outputs)

    def _run(
        self,
        work: Callable[[], _Work],
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
            made.micro_batches,
            specialized,
            self._loss_fn,
            autocast=self._autocast,
            scale=scale,
            labels=self.part.inputs.labels if keep_outputs else None,
        )
        plan = self._runner.fill_list(specialized, self._schedule, planned=planned, forward_only=forward_only)
        totals = self._runner.run(
            Step(
                plan=plan,
                model=stage,
                dtypes=stage.dtypes,
                agreement=agreement,
                forward_only=forward_only,
                finish=finish,
            )
        )
        self.trace = totals.trace
        return totals, stage

    def _begin(self, work: Callable[[], _Work]) -> tuple[StepAgreement, _Work, Sequence[Instruction] | None]:
        """The micro-batches, and the instructions of their plan, if there is one.

        What is new to a rank of a pipeline is new to all of them, and learned by all together. Else the first passes
        run while ranks still agree; the first transfer waits for it.
        """
        part, error = self.part, None
        made, planned, new = _Work((), None), None, False
        try:
            made = work()
            planned = None if made.plan is None else _planned(made.plan, part, len(made.micro_batches))
            new = not part.knows(made.micro_batches, self._autocast)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must raise too)
            error = raised
        plan = None if made.plan is None else (made.plan.iteration, made.plan.totals)
        agreement = start_agreement(
            part.ranks.control,
            error,
            repr([plan, *map(signature, made.micro_batches)]),
            "a replica's batch, its shapes, its values and its plan",
            alike=part.ranks.pipelines,
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

    def _divided(self, batch: Any, *, forward_only: bool = False) -> _Work:
        """A replica's batch as micro-batches."""
        named = self.part.inputs.name(batch)
        if self._planner is not None:
            return _Work(*self._planner.share(named, forward_only=forward_only))
        count = self._micro_batches or self.part.stages * self.part.chunks
        if self._micro_batch_size is not None:
            count = -(-batch_rows(named) // self._micro_batch_size)
        return _Work(split_batch(named, count), None)

    def _given(self, micro_batches: Sequence[Any], plan: Plan | None = None) -> _Work:
        return _Work([self.part.inputs.name(batch) for batch in micro_batches], plan)


def _planned(plan: Plan, part: Part, micro_batches: int) -> Sequence[Instruction]:
    """The instructions of this rank; raises ConfigError for a plan of other stages or other micro-batches."""
    if (plan.pipeline_stages, plan.chunks) != (part.stages, part.chunks):
        raise ConfigError(
            f"expected a plan for {part.stages} stages of {part.chunks} chunks, got one for {plan.pipeline_stages} of "
            f"{plan.chunks}"
        )
    if isinstance(plan, StageEntry):
        mine = plan
    else:  # of all replicas, or of this one alone
        mine = StageEntry.of(plan, part.replica if len(plan.replicas) > 1 else 0, part.stage, plan_digest="")
    if len(mine.micro_batches) != micro_batches:
        raise ConfigError(
            f"expected the {len(mine.micro_batches)} micro-batches that the plan is of, got {micro_batches}"
        )
    return mine.stage_plan.instructions


def _result(totals: StepTotals, stage: ModuleStage, *, overflow: bool, keep_outputs: bool) -> StepResult | StepOutputs:
    loss = torch.tensor(totals.mean_loss, dtype=torch.float32)
    if not keep_outputs:
        return StepResult(loss, overflow)
    kept = [stage.kept[row] for row in sorted(stage.kept)]
    return StepOutputs(loss, overflow, [output for output, _ in kept], [labels for _, labels in kept])
