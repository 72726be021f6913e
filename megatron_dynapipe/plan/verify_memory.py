"""Verify: what a rank's passes keep stays within the device's memory, by the bytes that the plan carries."""

from collections.abc import Sequence

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.instructions import Backward, Forward
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan
from megatron_dynapipe.plan.text import point_at
from megatron_dynapipe.units import BYTES_PER_MB


def check_memory(plan: IterationPlan, replica: ReplicaPlan, rank: int, passes: Sequence[int]) -> None:
    """Raise a PlanError where a forward's high-water mark passes the limit, given the steps of the rank's passes.

    A forward-only plan keeps nothing from pass to pass.
    """
    batches, instructions = replica.micro_batches, replica.stages[rank].instructions
    stages, limit, keeps = plan.pipeline_stages, plan.memory_limit_bytes, not plan.forward_only
    held = plan.model_state_bytes[rank]
    for step in passes:
        each = instructions[step]
        assert isinstance(each, Forward | Backward)
        micro_batch, stage = batches[each.micro_batch], each.chunk * stages + rank
        if isinstance(each, Backward):
            held -= micro_batch.stored_bytes[stage]
            continue
        high = held + micro_batch.peak_bytes[stage]
        if high > limit:
            raise PlanError(
                f"stage {rank}: expected at most {limit / BYTES_PER_MB:.0f} MB, got {high / BYTES_PER_MB:.0f} MB at "
                f"{point_at(instructions, step)}"
            )
        if keeps:
            held += micro_batch.stored_bytes[stage]
