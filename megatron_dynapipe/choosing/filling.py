"""How long micro-batches, here rows, take to fill the stages of a layer split, however many there are.

What a row takes at least is what it pays by itself and a share for every sample in it (`LeastWork.of_rows`): of row r,

    way(r)   from its start to stage s: forward passes on the stages before, and transfers
    first(r) the first stage; lowered to a constant and a part of the way, so that a shorter way has a shorter first
    work(r)  all its passes on stage s

Let arrival(r) = way(r) + the sum of first(i) over rows i that the first stage begins before r. Until then r cannot run
on s. With rows numbered by arrival, stage s has all work of rows k, k + 1, … ahead of it at arrival(k), so that, for
every k,

    T ≥ way(k) + Σ first(i that began before k) + Σ work(i ≥ k)

Take the mean of these with weights p1 ≥ p2 ≥ … of sum 1, and let P_k = p1 + … + p_k. Of two rows i < k, either i began
before k: then first(i) is in the inequality of k, with weight p_k. Or k began before i: then first(k) is in that of i,
with weight p_i ≥ p_k; and since k still arrives after i, its way is the longer, and so its first is: there is at least
p_k · first(i) again. Hence

    T ≥ Σ p_k · way(k) + (1 - P_k) · first(k) + P_k · work(k)

The right-hand side adds up over what rows pay by themselves and over samples. So no plan of m rows is faster than if
every sample were in the row that charges it least. Any weights give a bound. Weights that fall by way / (way + work -
first) from row to row make all rows charge alike: rows that grow by the inverse fill a pipeline best, each arriving
when the stage is done with those before. Few rows fill it slowly, many pay more by themselves; the bound is the least
over all m, where m rows or more are bounded by weights on the first m.

Whole backward passes are the same backwards in time: the way is that of gradients from s to the first stage. Ahead of
that goes the way forward of the shortest row, and the other way round. Of replicas, some has its part of any sum over
samples, here of what samples are charged by the number of rows that gives the bound.

Rows derived from padded costs are rounded up, so that very short ones pay little by themselves. All rows of fewer than
`SHORT` positions are taken for samples without a row, which pay by position. They may slip past others, and are only in
the bound of all work, T ≥ Σ work, which then has as much weight as charges them like others.
"""

from collections.abc import Iterator

import numpy as np

from megatron_dynapipe.choosing.least_work import LeastWork
from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.core.problem import BoolArray, IntArray

MOST = 64
"""So many rows or more are bounded together."""
SHORT = 96
"""Positions from which on a row that is rounded up counts as one."""
LIKE_OTHERS = 1.12
"""Of its work, what a sample in short rows is charged at least."""
_SLOWEST = 0.99
"""Weights fall at least by this."""


def fastest_filling(work: LeastWork) -> int:
    """What no plan of the samples under the layer split can beat, in ns."""
    bounds = [_of_stage(work, way, first, at_stage) + other_end for way, first, at_stage, other_end in _stages(work)]
    return int(max(max(bounds) - 2 * work.rounding - work.stages, 0))


def _stages(work: LeastWork) -> Iterator[tuple[Floats, Floats, Floats, float]]:
    """For every stage and direction: way, first stage and work, `[shares + 1]`, and what the other end takes.

    Shares are those of `LeastWork.of_rows`, for a row for every stage of what a replica has.
    """
    layout = work.layout
    stage_of = np.searchsorted(layout.cuts, np.arange(len(work.modules)), side="right")
    modules = np.zeros((work.time.shape[2], layout.virtual_stages))
    np.add.at(modules, (work.modules, stage_of), 1)
    positions = float((work.inputs + work.targets) @ work.counts) / work.replicas
    forward, backward, both = (costs @ modules for costs in work.of_rows(positions / work.stages))
    onward = forward[:, :-1] + _transfers(work, np.array(layout.decoder_state_forward, np.bool_))
    back = backward[:, :-1] + _transfers(work, np.array(layout.decoder_state_backward, np.bool_))
    latencies = np.append(work.links.latency_ns.min(axis=0), 0.0)
    for stage in range(work.stages):
        at_stage = both[:, stage :: work.stages].sum(axis=1)
        onward_least = float((work.forward @ modules + latencies)[:stage].sum())
        back_least = float((work.backward @ modules + latencies)[:stage].sum())
        yield onward[:, :stage].sum(axis=1), forward[:, 0], at_stage, 0.0 if work.divides else back_least
        if not work.divides:
            yield back[:, :stage].sum(axis=1), backward[:, 0], at_stage, onward_least


def _transfers(work: LeastWork, with_decoder: BoolArray) -> Floats:
    """What rows take from each virtual stage to the next: `[shares + 1, virtual stages - 1]`."""
    links = work.links
    positions = _with_pairs(work, work.inputs)[:, None] + _with_pairs(work, work.targets)[:, None] * with_decoder
    by_position = (8 * work.sent_per_position / links.gbps).min(axis=0)
    return np.concatenate([positions * by_position, links.latency_ns.min(axis=0)[None]])


def _with_pairs(work: LeastWork, values: IntArray) -> IntArray:
    """Values by sample for all shares: pairs of positions have none."""
    return np.concatenate([values, np.zeros_like(values)]) if work.cut else values


def _parts(work: LeastWork) -> Floats:
    """How often a replica has every share."""
    return np.asarray(np.tile(work.counts, 1 + work.cut) / work.replicas)


def _of_stage(work: LeastWork, way: Floats, first: Floats, at_stage: Floats) -> float:
    """The least over numbers of rows of one stage's bound."""
    if not (np.isfinite(way).all() and np.isfinite(at_stage).all() and at_stage[:-1].any()):
        return 0.0  # a sample of which nothing is known, or nothing to do
    charges, alone = _charges(work, way, first, at_stage)
    parts = _parts(work)
    bounds = alone + charges @ parts
    if work.replicas == 1:
        return float(bounds.min())
    measure = charges[bounds.argmin()]
    least = np.divide(charges, measure, out=np.full_like(charges, np.inf), where=measure > 0).min(axis=1)
    return float((alone + least * (measure @ parts)).min())


def _charges(work: LeastWork, way: Floats, first: Floats, at_stage: Floats) -> tuple[Floats, Floats]:
    """What shares are charged by numbers of rows, `[numbers, shares]`, and what these rows pay: `[numbers]`."""
    paid = SHORT / (SHORT + work.rounded_up)
    alone_in_row = at_stage[-1]
    way, first, at_stage = (np.append(of[:-1], of[-1] * paid) for of in (way, first, at_stage))
    rows = np.arange(1, MOST + 1)[:, None]
    if way[:-1].any():
        charges, alone = _by_rows(rows, _parts(work), way, first, at_stage)
    else:
        charges, alone = np.repeat(at_stage[None, :-1], MOST, axis=0), at_stage[-1] * rows[:, 0]
    if not work.rounded_up:
        return charges, alone
    part = _part_of_short(work, at_stage[:-1], alone_in_row)
    of_all = min(LIKE_OTHERS * part, 1.0)
    charges = np.minimum((1 - of_all) * charges + of_all * at_stage[:-1], at_stage[:-1] * of_all / part)
    alone = (1 - of_all) * alone + of_all * at_stage[-1] * rows[:, 0]
    return np.concatenate([charges, at_stage[None, :-1] / part]), np.append(alone, 0.0)


def _part_of_short(work: LeastWork, shares: Floats, alone: float) -> float:
    """The most that a short row takes for its shares, of its time; the last pieces have twice the pairs of others."""
    by_position = alone / (SHORT + work.rounded_up)
    samples = len(work.inputs)
    most = shares[:samples] + 2 * shares[samples:] if work.cut else shares
    return float((most / np.maximum(most + by_position * (work.inputs + work.targets), 1e-9)).max())


def _by_rows(rows: IntArray, parts: Floats, way: Floats, first: Floats, at_stage: Floats) -> tuple[Floats, Floats]:
    """`_charges` of a stage that is not the first, all rows counting as such."""
    goes = way[:-1] > 0
    share = (first[:-1][goes] / way[:-1][goes]).min()
    first = np.append(share * way[:-1], first[-1])
    rest = at_stage - first
    of_way, of_rest = (float(of[:-1] @ parts) for of in (way, rest))
    falls = min(of_way / max(of_way + of_rest, 1.0), _SLOWEST)
    whole = 1 - falls**rows
    begun = (way * (1 - falls) - rest * falls)[:-1] / whole  # what the first row charges beyond all that come after
    charges = first[:-1] + rest[:-1] / whole + np.where(begun > 0, begun * falls ** (rows - 1), begun)
    charges[-1] = np.minimum(charges[-1], at_stage[:-1])
    reached = ((rows - falls * whole / (1 - falls)) / whole)[:, 0]  # Σ P_k
    return charges, way[-1] + first[-1] * (rows[:, 0] - reached) + at_stage[-1] * reached
