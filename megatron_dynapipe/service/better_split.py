"""A layer split that suits what passes take better than a run's own, which its log names."""

from collections import Counter

import msgspec

from megatron_dynapipe.choosing.planners import planner_over
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.model import LayerSplit, ModuleSplit
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.planner import Planner

BETTER = 0.05
"""A run is not told of a split that is less faster: a start takes time, too."""
_MOVES = 4


def better_split(planner: Planner, batch: GlobalBatch) -> tuple[LayerSplit, float] | None:
    """Layers per virtual stage under corrected costs, and how many times as fast; None where none gains `BETTER`.

    A layer after another moves from the rank that works longest to the one that works least, as long as plans are
    faster by it. Corrections stay with their virtual stages.

    Args:
        planner: of costs that were corrected.
        batch: that is planned under every split.

    Raises:
        PlanningError: the batch has no plan under the present split.
    """
    model = planner.settings.model
    first = fastest = planner.plan(batch, 0)
    best = split = planner.layout.modules_per_stage
    for _ in range(_MOVES):
        split = _moved(split, fastest, model.modules_per_layer)
        try:
            settings = msgspec.structs.replace(planner.settings, modules_per_stage=split)
            made = planner_over(settings, planner.tables, costs_digest=planner.costs_digest).plan(batch, 0)
        except DynaPipeError:  # it does not fit
            break
        if made.totals.predicted_ns >= fastest.totals.predicted_ns:
            break
        best, fastest = split, made
    gain = first.totals.predicted_ns / fastest.totals.predicted_ns
    return (model.layers_of(best), gain) if gain >= 1 + BETTER else None


def _moved(split: ModuleSplit, plan: IterationPlan, step: int) -> ModuleSplit:
    """The split with so many modules less on the rank that works longest, and more on the one that works least.

    The same one where none of its virtual stages would keep any.
    """
    work = Counter[int]()
    for replica in plan.replicas:
        for stage in replica.stages:
            passes = (event for event in stage.predicted if isinstance(event.instruction, Pass))
            work[stage.stage] += sum(event.end_ns - event.start_ns for event in passes)
    ranks = sorted(work, key=work.__getitem__)
    chunks = range(0, len(split), len(ranks))
    source = max((ranks[-1] + first for first in chunks), key=split.__getitem__)
    destination = min((ranks[0] + first for first in chunks), key=split.__getitem__)
    counts = list(split)
    if counts[source] <= step:
        return split
    counts[source] -= step
    counts[destination] += step
    return tuple(counts)
