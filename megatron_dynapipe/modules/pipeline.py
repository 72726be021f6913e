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
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.instructions import Instruction
from megatron_dynapipe.core.plan import IterationPlan, StagePlan
from megatron_dynapipe.modules.boundary import (
    Part,
    Specialization,
    checksum,
    fill,
    lists_without_shapes,
    signature,
)
from megatron_dynapipe.modules.checkpoint import load_checkpoint, save_checkpoint
from megatron_dynapipe.modules.gradients import Gradients, LossScale
from megatron_dynapipe.modules.inputs import Batch, batch_rows, split_batch
from megatron_dynapipe.modules.loader import ModulePlanner
from megatron_dynapipe.modules.ranks import Failures, start_agreement
from megatron_dynapipe.modules.runner import LossFunction, ModuleStage, check_count
from megatron_dynapipe.runtime import PendingTotals, Step, Trace, step_runner
from megatron_dynapipe.runtime.control_group import StepAgreement
from megatron_dynapipe.runtime.shared_weights import SharedWeights
from megatron_dynapipe.store.entry import StageEntry

_COMPARED_STEPS = 100
_COMPARED_EVERY = 10
"""The values of batches are compared among ranks in so many first steps, then in each step of that many."""
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

Plan = IterationPlan | StageEntry
"""Gives the order in which passes run: a whole iteration's plan, or this rank's share of it."""
StepWork = tuple[Sequence[Batch], Plan | None]
"""Micro-batches by names of the model's arguments, and their plan, if there is one."""


class StepResult(tuple[torch.Tensor, bool]):
    """Result of a step, the same on every rank: the pair of `loss, overflow = pipeline.step(batch)`, and more.

    Attributes:
        loss: sum over everything / count over everything: a float32 scalar without a graph, on the host.
        overflow: gradients were not finite (fp16), so that no rank changed its weights.
        outputs: with `return_outputs`, on the last stage, what the model returned for each micro-batch.
        labels: the labels of each micro-batch, likewise.
    """

    outputs: Sequence[Any]
    labels: Sequence[Batch]

    def __new__(
        cls, loss: torch.Tensor, overflow: bool, outputs: Sequence[Any] = (), labels: Sequence[Batch] = ()
    ) -> "StepResult":
        """The pair, with what was kept of the last stage."""
        result = super().__new__(cls, (loss, overflow))
        result.outputs = outputs
        result.labels = labels
        return result

    @property
    def loss(self) -> torch.Tensor:
        """The first of the pair."""
        return self[0]

    @property
    def overflow(self) -> bool:
        """The second of the pair."""
        return self[1]


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
        loss_scale: scales losses in fp16; by default `torch.amp.GradScaler("cpu")`, whose state lives on the host.
        timeout_s: deadline of every transfer.

    Attributes:
        norm: the norm of the last step's gradients before clipping; None if nothing asked for it.
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
        tensor_shapes: object = None,
        loss_scale: GradScaler | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"expected a precision among {', '.join(PRECISIONS)}, got {precision!r}")
        if micro_batches is not None and micro_batch_size is not None:
            raise ConfigError("expected a number of micro-batches or their size, got both")
        self._planner = planner
        self._micro_batches = micro_batches
        self._micro_batch_size = micro_batch_size
        if tensor_shapes is not None:
            part.use_shapes(tensor_shapes)
        self.loss_scale = (loss_scale or GradScaler("cpu")) if precision == "fp16" else None
        self.part = part
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._autocast = PRECISIONS[precision]
        self._max_norm = max_norm
        self._schedule = schedule
        self._scale = None if self.loss_scale is None else LossScale(self.loss_scale)
        self._steps = 0
        self._filled: tuple[object, Sequence[Instruction], StagePlan] | None = None
        self.norm: float | None = None
        self.trace: Trace | None = None
        ranks = part.ranks
        backend = part.backend
        copies = part.weight_copies()
        shared = SharedWeights(copies, ranks.pipelines, backend=backend, timeout_s=timeout_s) if copies else None
        replicas, stages = ranks.groups(backend)
        self._gradients = Gradients(part, part.device, replicas=replicas, stages=stages, shared=shared)
        transport, channels = part.connect(timeout_s)
        groups = [*ranks.control.groups, *channels, replicas, stages, *(shared.groups if shared else ())]
        self._failures = Failures(ranks.control, [group for group in groups if group is not None])
        self._runner = step_runner(
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

    def step(self, batch: Any, *, return_outputs: bool = False) -> StepResult:
        """Run a batch forward and backward, reduce the gradients and update the weights.

        Args:
            batch: this replica's share: the same on every rank of its pipeline. A dict by names of the model's
                arguments, or a tuple or tensor; labels that only the loss reads come with it.
            return_outputs: keep the model's outputs and the labels for the result.

        Raises:
            DataError, ConfigError: on every rank alike: a key that the model does not know, no samples, tensors
                inside lists or dicts, a batch that differs among the ranks of a pipeline (values on the host are
                compared in the first steps and then in some), a loss without a graph, a count that cannot be one.
        """
        return self._train(lambda: self._shared_out(batch), keep_outputs=return_outputs)

    def run(
        self, micro_batches: Sequence[Any], plan: Plan | None = None, *, return_outputs: bool = False
    ) -> StepResult:
        """`step` with micro-batches as they are, in the order of passes that a plan says.

        Args:
            micro_batches: this replica's; it may have none.
            plan: this iteration's, as `DynaPipeDataLoader` yields it; None runs them in this pipeline's schedule.
            return_outputs: as in `step`.
        """
        return self._train(lambda: (self._named(micro_batches), plan), keep_outputs=return_outputs)

    def evaluate(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, return_outputs: bool = False
    ) -> StepResult:
        """The loss of a batch, or of micro-batches, without gradients; the part is in evaluation mode meanwhile."""

        def work() -> StepWork:
            if micro_batches is not None:
                return self._named(micro_batches), None
            return self._shared_out(batch, forward_only=True)

        training = self.part.training
        self.part.eval()
        try:
            return self._run(work, keep_outputs=return_outputs, forward_only=True)
        finally:
            self.part.train(training)

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

    def _shared_out(self, batch: Any, *, forward_only: bool = False) -> StepWork:
        """A replica's batch as micro-batches."""
        named = self.part.inputs.name(batch)
        if self._planner is not None:
            return self._planner.share(named, forward_only=forward_only)
        count = self._micro_batches or self.part.stages * self.part.chunks
        if self._micro_batch_size is not None:
            count = -(-batch_rows(named) // self._micro_batch_size)
        return split_batch(named, count), None

    def _named(self, micro_batches: Sequence[object]) -> Sequence[Batch]:
        return [self.part.inputs.name(batch) for batch in micro_batches]

    def _train(self, work: Callable[[], StepWork], *, keep_outputs: bool) -> StepResult:
        self._gradients.zero()
        return self._run(work, keep_outputs=keep_outputs, scale=None if self._scale is None else self._scale.value)

    def _run(
        self,
        work: Callable[[], StepWork],
        *,
        keep_outputs: bool,
        forward_only: bool = False,
        scale: float | None = None,
    ) -> StepResult:
        """Run micro-batches through this rank's virtual stages; all ranks raise what making them raises on one."""

        def finish(totals: PendingTotals) -> None:
            _, count = totals.wait()
            check_count(count)
            self._gradients.reduce((count or 1.0) * (scale or 1.0))

        with self._failures.named():
            agreement, micro_batches, planned = self._begin(work)
            specialized = self.part.specialize(micro_batches, self._autocast)
            stage = ModuleStage(
                self._runner,
                [self.part.share(batch) for batch in micro_batches],
                specialized,
                self._loss_fn,
                autocast=self._autocast,
                scale=scale,
                labels=self.part.inputs.labels if keep_outputs else None,
            )
            plan = self._list(specialized, planned, forward_only=forward_only)
            self.part.expect(plan, micro_batches)
            step = Step(
                plan=plan,
                model=stage,
                dtypes=stage.dtypes,
                agreement=agreement,
                forward_only=forward_only,
                finish=finish,
            )
            totals = self._runner.run(step)
            check_count(totals.count)
            self.trace = totals.trace
            overflow = not forward_only and self._update()
        outputs = [stage.kept[row] for row in sorted(stage.kept)]
        loss = torch.tensor(totals.mean_loss, dtype=torch.float32)
        return StepResult(loss, overflow, [output for output, _ in outputs], [labels for _, labels in outputs])

    def _begin(
        self, work: Callable[[], StepWork]
    ) -> tuple[StepAgreement, Sequence[Batch], Sequence[Instruction] | None]:
        """The micro-batches, and the instructions of their plan, if there is one.

        What is new to a rank of a pipeline is new to all of them, and learned by all together. Else the first passes
        run while ranks still agree; the first transfer waits for it.
        """
        part = self.part
        error = None
        micro_batches: Sequence[Batch] = ()
        plan = None
        planned = None
        new = False
        try:
            micro_batches, plan = work()
            planned = None if plan is None else planned_instructions(plan, part, len(micro_batches))
            new = not part.knows(micro_batches, self._autocast)
        except Exception as raised:  # noqa: BLE001  (whatever it is, the other ranks must raise too)
            error = raised
        identity = None if plan is None else (plan.iteration, plan.totals)
        agreement = start_agreement(
            part.ranks.control,
            error,
            repr([identity, part.state, *map(signature, micro_batches)]),
            "a replica's batch, its shapes, its values, its plan and the model's attributes",
            alike=part.ranks.alike,
            checksum=self._checksum(micro_batches),
            new=new,
            learn=partial(part.learn, micro_batches, self._autocast),
        )
        if error is not None or new:
            agreement.settle()
        return agreement, micro_batches, planned

    def _list(
        self, specialized: Sequence[Specialization], planned: Sequence[Instruction] | None, *, forward_only: bool
    ) -> StagePlan:
        """The list of this rank for micro-batches; that of the step before, where it was of the same.

        `planned` are this rank's instructions in a plan, in which shapes are not looked at.
        """
        part = self.part
        instructions = planned or ()
        if planned is None and specialized:
            count = len(specialized)
            lists = lists_without_shapes(part.stages, part.chunks, count, self._schedule, forward_only=forward_only)
            instructions = lists[part.stage]
        key = (tuple(map(id, specialized)), id(instructions))
        if self._filled is None or self._filled[0] != key:
            filled = fill(instructions, specialized, stage=part.stage, stages=part.stages)
            self._filled = key, instructions, filled
        return self._filled[2]

    def _checksum(self, micro_batches: Sequence[Batch]) -> bytes:
        """Checksum of the values, in the first steps and then now and again: it takes 0.4 ms per megabyte."""
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


def planned_instructions(plan: Plan, part: Part, micro_batches: int) -> Sequence[Instruction]:
    """The instructions of this rank; raises ConfigError for a plan of other stages or other micro-batches."""
    if (plan.pipeline_stages, plan.chunks) != (part.stages, part.chunks):
        raise ConfigError(
            f"expected a plan for {part.stages} stages of {part.chunks} chunks, got one for {plan.pipeline_stages} of "
            f"{plan.chunks}"
        )
    entry = plan
    if isinstance(entry, IterationPlan):  # of all replicas, or of this one alone
        entry = StageEntry.of(entry, part.replica if len(entry.replicas) > 1 else 0, part.stage, plan_digest="")
    if len(entry.micro_batches) != micro_batches:
        raise ConfigError(
            f"expected the {len(entry.micro_batches)} micro-batches that the plan is of, got {micro_batches}"
        )
    return entry.stage_plan.instructions
