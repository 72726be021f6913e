"""Verify: what a rank's passes keep stays within the device's memory, by the bytes that the plan carries."""

from collections.abc import Sequence

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan
from megatron_dynapipe.plan.memory import high_water_marks
from megatron_dynapipe.plan.text import point_at
from megatron_dynapipe.units import in_mb


def check_memory(plan: IterationPlan, replica: ReplicaPlan, rank: int, passes: Sequence[int]) -> None:
    """Raise a PlanError where a pass's high-water mark passes the limit, given the steps of the rank's passes."""
    limit = plan.memory_limit_bytes
    for step, high in zip(passes, high_water_marks(plan, replica, rank, passes), strict=True):
        if high > limit:
            most, found = in_mb(limit, high)
            raise PlanError(
                f"stage {rank}: expected at most {most}, got {found} at "
                f"{point_at(replica.stages[rank].instructions, step)}"
            )
