"""What a stage's passes hold in memory, by the bytes that the plan carries; verified to stay within the device's."""

from collections.abc import Iterator, Sequence

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.instructions import BackwardInput, Forward, Pass
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan, StageEntry
from megatron_dynapipe.plan.text import point_at
from megatron_dynapipe.units import in_mb


def high_water_marks(plan: IterationPlan, replica: ReplicaPlan, stage: int, passes: Sequence[int]) -> Iterator[int]:
    """The most bytes that a stage holds while each of its passes runs, model state included.

    A backward frees what its forward kept, a divided one with its second half; a forward-only plan keeps nothing from
    pass to pass.

    Args:
        plan: of the iteration.
        replica: one of its replicas.
        stage: one of its pipeline stages.
        passes: steps of its passes, in order.
    """
    batches, instructions, stages = replica.micro_batches, replica.stages[stage].instructions, plan.pipeline_stages
    held = plan.model_state_bytes[stage]
    for step in passes:
        each = instructions[step]
        assert isinstance(each, Pass)
        micro_batch, v = batches[each.micro_batch], each.chunk * stages + stage
        stored, peak = micro_batch.stored_bytes[v], micro_batch.peak_bytes[v]
        if isinstance(each, Forward):
            yield held + peak
            held += 0 if plan.forward_only else stored
        else:
            yield held if not plan.peak_covers_backward else held - stored + peak
            held -= 0 if isinstance(each, BackwardInput) else stored


def activation_peak_bytes(entry: StageEntry) -> int:
    """The most bytes that the passes of a training iteration's stage hold at a time, without model state."""
    most = held = 0
    for each in entry.stage_plan.instructions:
        if isinstance(each, Pass):
            v = each.chunk * entry.pipeline_stages + entry.stage_plan.stage
            micro_batch = entry.micro_batches[each.micro_batch]
            if isinstance(each, Forward):
                most = max(most, held + micro_batch.peak_bytes[v])
                held += micro_batch.stored_bytes[v]
            elif not isinstance(each, BackwardInput):
                held -= micro_batch.stored_bytes[v]
    return most


def peak_bytes(plan: IterationPlan, replica: ReplicaPlan, stage: int) -> int:
    """The most bytes that a stage holds at any time, model state included."""
    instructions = enumerate(replica.stages[stage].instructions)
    passes = [step for step, each in instructions if isinstance(each, Pass)]
    return max([plan.model_state_bytes[stage], *high_water_marks(plan, replica, stage, passes)])


def check_memory(plan: IterationPlan, replica: ReplicaPlan, stage: int, passes: Sequence[int]) -> None:
    """Raise a PlanError where a pass's high-water mark passes the limit, given the steps of the stage's passes."""
    limit = plan.memory_limit_bytes
    for step, high in zip(passes, high_water_marks(plan, replica, stage, passes), strict=True):
        if high > limit:
            most, found = in_mb(limit, high)
            raise PlanError(
                f"stage {stage}: expected at most {most}, got {found} at "
                f"{point_at(replica.stages[stage].instructions, step)}"
            )
