"""What a step is given and what it gives back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.runner import ModuleStage
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.iteration import IterationPlan, StageEntry
from megatron_dynapipe.runtime import StepTotals

Plan = IterationPlan | StageEntry
"""Gives the order in which passes run: a whole iteration's plan, or this rank's share of it."""


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


def planned_instructions(plan: Plan, part: Part, micro_batches: int) -> Sequence[Instruction]:
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


def step_result(
    totals: StepTotals, stage: ModuleStage, *, overflow: bool, keep_outputs: bool
) -> StepResult | StepOutputs:
    """With what the last stage kept of the model's outputs, if that is wanted."""
    loss = torch.tensor(totals.mean_loss, dtype=torch.float32)
    if not keep_outputs:
        return StepResult(loss, overflow)
    kept = [stage.kept[row] for row in sorted(stage.kept)]
    return StepOutputs(loss, overflow, [output for output, _ in kept], [labels for _, labels in kept])
