"""How much of its stages' time a plan leaves without a pass."""

from megatron_dynapipe.plan.iteration import IterationPlan

MUCH_IDLE = 0.25
"""From which on a reader is told what shortens it."""


def idle_share(plan: IterationPlan) -> float:
    """Of all stages' time until the slowest replica's last pass; 0 for a plan without passes."""
    timelines = [stage.predicted for replica in plan.replicas for stage in replica.stages]
    whole = plan.totals.predicted_ns * len(timelines)
    busy = sum(event.end_ns - event.start_ns for events in timelines for event in events)
    return 1 - busy / whole if whole else 0.0
