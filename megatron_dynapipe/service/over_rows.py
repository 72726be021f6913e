"""What plans gain on a run's own layout over packed rows as other trainers make them, of one batch."""

from megatron_dynapipe.choosing.planners import planner_over
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import NS_PER_MS, BatchLayout
from megatron_dynapipe.service.better_split import better_split
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.planned_splits import PlannedSplits
from megatron_dynapipe.ways.rivals.settings import TITLES, PartitionAlgorithm, PartitionSettings, in_rows

NOTHING = 0.02
"""Predictions do not tell smaller gains from none."""


class ComparedSplits(PlannedSplits):
    """Plans of a dataset, and what they gain: for the planner process, whose run's log says so."""

    def over_rows(self) -> str:
        """What plans gain over packed rows in the first training iteration, in words; empty where that is unknown."""
        trained = next((split for split, evaluation in self._evaluations.items() if evaluation is None), None)
        if trained is None:
            return ""
        with self._drawing:
            batch = self._samplers[trained].batch(self._first[trained])
        return over_rows(self._planner, batch)

    def better_split(self, split: str, correction: Correction) -> str:
        """The layer split that suits a correction better than the run's own, in words; empty where none does."""
        with self._drawing:
            batch = self._samplers[split].batch(self._first[split])
        found = better_split(self.following(split, correction), batch)
        if found is None:
            return ""
        layers, gain = found
        return (
            f"another layer split is predicted to be {gain:.2f} times as fast by what passes take:"
            f" --dynapipe-layers-per-stage {','.join(map(str, layers))} (checkpoints can be loaded under it)"
        )


def over_rows(planner: Planner, batch: GlobalBatch) -> str:
    """A batch's plan and the fastest rows in the run's own stages, as a line of its log; empty where rows cannot run.

    Raises:
        PlanningError: the batch has no plan.
    """
    if BatchLayout.PACKED not in planner.settings.micro_batch_layouts:
        return ""
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
        return ""
    fastest = min(found, key=found.__getitem__)
    both = f"{planned / NS_PER_MS:.1f} ms, {fastest} {found[fastest] / NS_PER_MS:.1f} ms"
    return told(found[fastest] / planned, both, stages=planner.layout.stages)


def told(gain: float, both: str, *, stages: int) -> str:
    """The line, which begins with what is bad for plans and says what to do then.

    Args:
        gain: time of rows over that of the plan.
        both: these times, in words.
        stages: the number of the pipeline's stages.
    """
    elsewhere = "`megatron-dynapipe tune` compares each on its own best layout"
    if gain < 1 - NOTHING:
        chosen = (
            "plans choose layers and virtual stages with --dynapipe-layers-per-stage auto, in Megatron-Bridge with"
            ' layers="auto"; '
        ) * (stages > 1)
        return f"plans are predicted to be slower than packed rows on this layout: {both}. {chosen}{elsewhere}"
    how = "gain nothing over" if gain < 1 + NOTHING else f"be {gain:.2f} times as fast as"
    return f"plans are predicted to {how} packed rows on this layout: {both}; {elsewhere}"
