"""Steps of one rank's part: agree, run the list, reduce the gradients, update the weights.

What `Pipeline` and `UnevenPipeline` share; they say what a step's micro-batches are.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part, checksum, signature
from megatron_dynapipe.modules.gradients import Gradients, LossScale
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.ranks import Failures, start_agreement
from megatron_dynapipe.modules.runner import LossFunction, ModuleRunner, ModuleStage
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.iteration import IterationPlan, StageEntry
from megatron_dynapipe.runtime import PendingTotals, Step, StepTotals, Trace
from megatron_dynapipe.runtime.control_group import StepAgreement
from megatron_dynapipe.runtime.shared_weights import SharedWeights

Plan = IterationPlan | StageEntry
"""Gives the order in which passes run: a whole iteration's plan, or this rank's share of it."""

_COMPARED_STEPS, _COMPARED_EVERY = 100, 10
"""The values of batches are compared among ranks in so many first steps, then in each step of that many."""


class StepWork(NamedTuple):
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


class ModuleSteps:
    """What runs a part's steps. Every rank makes it at the same point: it makes process groups.

    Args:
        autocast: dtype that operations are cast to, if any.
        loss_scale: the same on every rank; None without.

    The others are `Pipeline`'s, which says the attributes, too.
    """

    def __init__(
        self,
        part: Part,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: LossFunction,
        *,
        autocast: torch.dtype | None = None,
        loss_scale: GradScaler | None = None,
        max_norm: float | None = None,
        schedule: str = "1f1b",
        timeout_s: float = 300.0,
    ) -> None:
        self.part, self._optimizer, self._loss_fn, self._autocast = part, optimizer, loss_fn, autocast
        self._max_norm, self._schedule = max_norm, schedule
        self._scale = None if loss_scale is None else LossScale(loss_scale)
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
        return _result(totals, stage, overflow=overflow, keep_outputs=keep_outputs)

    def _evaluate(self, work: Callable[[], StepWork], *, keep_outputs: bool) -> StepResult | StepOutputs:
        """Run micro-batches forward, with the part in evaluation mode meanwhile."""
        training = self.part.training
        self.part.eval()
        try:
            with self._failures.named():
                totals, stage = self._run(work, forward_only=True, keep_outputs=keep_outputs)
        finally:
            self.part.train(training)
        return _result(totals, stage, overflow=False, keep_outputs=keep_outputs)

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
            planned = None if made.plan is None else _planned(made.plan, part, len(made.micro_batches))
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
