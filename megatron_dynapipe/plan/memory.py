"""What a rank's passes hold in memory, by the bytes that the plan carries."""

from collections.abc import Iterator, Sequence

from megatron_dynapipe.plan.instructions import Backward, Forward
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan


def high_water_marks(plan: IterationPlan, replica: ReplicaPlan, rank: int, passes: Sequence[int]) -> Iterator[int]:
    """The most bytes that a rank holds while each of its passes runs, model state included.

    A backward frees what its forward kept; a forward-only plan keeps nothing from pass to pass.

    Args:
        plan: of the iteration.
        replica: one of its replicas.
        rank: one of its pipeline ranks.
        passes: steps of its forwards and backwards, in order.
    """
    batches, instructions, stages = replica.micro_batches, replica.stages[rank].instructions, plan.pipeline_stages
    held = plan.model_state_bytes[rank]
    for step in passes:
        each = instructions[step]
        assert isinstance(each, Forward | Backward)
        micro_batch, stage = batches[each.micro_batch], each.chunk * stages + rank
        stored, peak = micro_batch.stored_bytes[stage], micro_batch.peak_bytes[stage]
        if isinstance(each, Backward):
            yield held if not plan.peak_covers_backward else held - stored + peak
            held -= stored
        else:
            yield held + peak
            held += 0 if plan.forward_only else stored


def peak_bytes(plan: IterationPlan, replica: ReplicaPlan, rank: int) -> int:
    """The most bytes that a rank holds at any time, model state included."""
    instructions = enumerate(replica.stages[rank].instructions)
    passes = [step for step, each in instructions if isinstance(each, Forward | Backward)]
    return max([plan.model_state_bytes[rank], *high_water_marks(plan, replica, rank, passes)])
