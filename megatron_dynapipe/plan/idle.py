"""The share of its stages' time in which a plan runs no pass."""

from megatron_dynapipe.plan.iteration import IterationPlan

MUCH_IDLE = 0.25
"""Idle share from which on commands and run summaries add a hint at what lowers it."""


def idle_share(plan: IterationPlan) -> float:
    """Of all stages' time until the slowest replica's last pass; 0 for a plan without passes."""
    timelines = [stage.predicted for replica in plan.replicas for stage in replica.stages]
    whole = plan.totals.predicted_ns * len(timelines)
    busy = sum(event.end_ns - event.start_ns for events in timelines for event in events)
    return 1 - busy / whole if whole else 0.0
