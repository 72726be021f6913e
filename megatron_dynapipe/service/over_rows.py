"""What plans gain on a run's own layout over packed rows as other trainers make them, of one batch."""

import msgspec

from megatron_dynapipe.choosing.planners import planner_over
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.sampling.global_batch import GlobalBatch
from megatron_dynapipe.ways.rivals.settings import TITLES, PartitionAlgorithm, PartitionSettings, in_rows

NOTHING = 0.02
"""Predictions do not tell smaller gains from none."""


class OverRows(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted times of a batch.

    Attributes:
        plan_ms: of its plan.
        rows_ms: of the fastest of other trainers' rows, in the run's own virtual stages and layers.
        rows: whose they are.
        stages: of the pipeline.
    """

    plan_ms: float
    rows_ms: float
    rows: str
    stages: int

    def __str__(self) -> str:
        """One line for a run's log, which begins with what is bad for plans, and says what to do then."""
        both = f"{self.plan_ms:.1f} ms, {self.rows} {self.rows_ms:.1f} ms"
        ratio = self.rows_ms / self.plan_ms
        elsewhere = "`megatron-dynapipe tune` compares each on its own best layout"
        if ratio < 1 - NOTHING:
            first = "--dynapipe-layers-per-stage auto chooses layers and virtual stages; " * (self.stages > 1)
            return f"plans are predicted to be slower than packed rows on this layout: {both}. {first}{elsewhere}"
        if ratio < 1 + NOTHING:
            return f"plans are predicted to gain nothing over packed rows on this layout: {both}; {elsewhere}"
        return f"plans are predicted to be {ratio:.2f} times as fast as packed rows on this layout: {both}; {elsewhere}"


def over_rows(planner: Planner, batch: GlobalBatch) -> OverRows | None:
    """The prediction for a batch; None where rows have no plan, or cannot be trained.

    Raises:
        PlanningError: the batch has no plan.
    """
    if BatchLayout.PACKED not in planner.settings.micro_batch_layouts:
        return None
    planned = planner.plan(batch, 0).totals.predicted_ns
    found: dict[str, int] = {}
    for name, title in TITLES.items():
        settings = in_rows(planner.settings, PartitionSettings(algorithm=PartitionAlgorithm(name)))
        theirs = planner_over(settings, planner.tables, costs_digest=planner.costs_digest)
        try:
            found[title] = theirs.plan(batch, 0).totals.predicted_ns
        except PlanningError:
            continue
    if not found:
        return None
    rows = min(found, key=found.__getitem__)
    stages = planner.layout.stages
    return OverRows(plan_ms=planned / 1e6, rows_ms=found[rows] / 1e6, rows=rows, stages=stages)
