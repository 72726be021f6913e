"""Plans of a run's first batches, which its other plans follow: rows that hold other samples of the run as well."""

from collections.abc import Sequence

from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.partition import by_length
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import Precedent
from megatron_dynapipe.core.units import BatchLayout

MILLION = 1_000_000


def precedents_of(planner: Planner, batches: Sequence[GlobalBatch]) -> tuple[Precedent, ...]:
    """What plans of other batches follow of these batches' plans; nothing of one that cannot be planned.

    Nothing at all where micro-batches are padded, and on one stage of one replica, where a search is short.
    """
    settings = planner.settings
    alone = planner.layout.virtual_stages == settings.data_parallel == 1
    if alone or not settings.searches or BatchLayout.PACKED not in settings.micro_batch_layouts:
        return ()
    found = []
    for batch in batches:
        try:
            found.append(precedent_of(planner, batch, planner.plan(batch, 0)))
        except PlanningError:
            continue
    return tuple(each for each in found if each is not None)


def precedent_of(planner: Planner, batch: GlobalBatch, plan: IterationPlan) -> Precedent | None:
    """What others follow of a batch's plan: of one with padded micro-batches or pieces no rows, its time alone.

    None where nothing is known of the batch in packed rows.
    """
    samples = planner.samples(batch)
    order = by_length(samples.inputs, samples.targets)
    estimate = planner.problem(samples).native.estimate(order=order)
    if estimate is None:
        return None
    rows = [(number, row) for number, replica in enumerate(plan.replicas) for row in replica.micro_batches]
    modes = {mode: number for number, mode in enumerate(planner.settings.recompute)}
    followed = tuple(
        (number, sum(row.input_lengths), sum(row.target_lengths), *(modes[mode] for mode in row.recompute))
        for number, row in rows
    )
    over_estimate = round(MILLION * plan.totals.predicted_ns / estimate)
    may_follow = all(row.layout is BatchLayout.PACKED and not row.pieces for _, row in rows)
    return over_estimate, followed if may_follow else ()
