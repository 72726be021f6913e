"""What the job's planners report of themselves, summed up for TensorBoard and Weights & Biases."""

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.service.figures import decode_figures
from megatron_dynapipe.store import PlanKeys, PlanStore
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS


def planner_metrics(store: PlanStore, keys: PlanKeys, planners: int) -> dict[str, float]:
    """Figures of all planners together, by name; nothing where the store cannot say.

    Args:
        store: where planners report.
        keys: names in it.
        planners: the most that the job may have.
    """
    try:
        reports = store.read_latest([keys.figures(planner) for planner in range(planners)])
    except StoreError:
        return {}  # whoever waits for a plan says so
    found = [figures for data in reports if data is not None and (figures := decode_figures(data)) is not None]
    if not found:
        return {}
    planned = sum(each.planned for each in found)
    return {
        "planners": float(len(found)),
        "planning time (ms)": sum(each.planning_ns for each in found) / NS_PER_MS / max(planned, 1),
        "plan size (MB)": sum(each.published_bytes for each in found) / BYTES_PER_MB / max(planned, 1),
        "planned ahead (iterations)": float(max(each.window_iterations for each in found)),
        "planned ahead (MB)": max(each.window_bytes for each in found) / BYTES_PER_MB,
        "leases taken over": float(sum(each.taken_over for each in found)),
        "store interruptions": float(sum(each.interruptions for each in found)),
    }
