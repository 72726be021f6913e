"""What filling the stages of a layer split costs any plan, however many micro-batches (here rows) it has.

A row takes at least what it pays by itself and a share for each of its samples (`StageWork.of_rows`). For a stage s let

    way(r)    be what row r takes to come to s: its forward passes on the stages before, and transfers,
    first(r)  its pass on the first stage, lowered to a constant and a part of its way, so that of two rows the one with
              the shorter way has the shorter first pass, too,
    work(r)   all its passes on s.

Let arrival(r) = way(r) + the sum of first(i) over all rows i that the first stage begins before r. Stage s cannot begin
r earlier. Number rows by arrival: at arrival(k), stage s has all work of rows k, k + 1, … ahead of it. So for every k

    T ≥ way(k) + Σ first(i that began before k) + Σ work(i ≥ k).

Take the mean of these with weights p1 ≥ p2 ≥ … that add up to 1, and let P_k = p1 + … + p_k. Of two rows i < k, one
began before the other on the first stage. If it was i, the inequality of k holds first(i), with weight p_k. If it was
k, that of i holds first(k), with weight p_i ≥ p_k; and since k arrives later all the same, its way is the longer one,
so that first(k) ≥ first(i). Either way there is at least p_k · first(i), and therefore

    T ≥ Σ p_k · way(k) + (1 - P_k) · first(k) + P_k · work(k).

This adds up over what rows pay and over samples. So no plan of m rows is faster than if every sample were in the row
that charges it least. Any weights give a bound. If they fall by way / (way + work - first) from row to row, all rows
charge alike, which is best: it belongs to rows that grow by the inverse, each arriving when s is done with the others.
Few rows fill the pipeline slowly, many pay more; the bound is the least over all m. Of `MOST` rows or more, those
after the first `MOST` have no weight, and charge their work.

The last stages drain as the first ones fill: if backward passes are whole, the same holds backwards in time, with the
gradients' way from s to the first stage; and the least way of any row at the other end comes on top.

Of several replicas one has at least its part of any sum over samples. The sum is of what samples are charged by the
number of rows that would give the bound.

Rows derived from padded costs pay by their positions over these rounded up, so very short ones pay little. In rows of
fewer than `SHORT` positions, samples pay by position and no row is counted. Such rows may slip past others, so they
are only in T ≥ Σ work, which gets as much weight as it takes to charge them like others.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.planning.stage_work import StageWork
from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.core.problem import IntArray

MOST = 64
"""So many rows or more are bounded together."""
SHORT = 96
"""Positions from which on a row that is rounded up counts as one."""
LIKE_OTHERS = 1.12
"""The part of its work that a sample in short rows is charged at least, if that bound has less than all the weight."""
_SLOWEST = 0.99
"""Weights fall at least by this."""


def fastest_filling(work: StageWork) -> int:
    """What no plan of the samples under the layer split can beat, in ns."""
    longest = 0.0
    for way, first, at_stage, other_end in _stages(work):
        longest = max(longest, _of_stage(work, way, first, at_stage) + other_end)
    return int(max(longest - 2 * work.rounding - work.stages, 0))


def _stages(work: StageWork) -> Iterator[tuple[Floats, Floats, Floats, float]]:
    """For every stage and direction: way, first stage and work, `[shares + 1]`, and what the other end takes.

    Shares are those of `StageWork.of_rows`, for a row for every stage of what a replica has.
    """
    layout = work.layout
    stage_of = np.searchsorted(layout.cuts, np.arange(len(work.modules)), side="right")
    modules = np.zeros((work.time.shape[2], layout.virtual_stages))
    np.add.at(modules, (work.modules, stage_of), 1)
    positions = float((work.inputs + work.targets) @ work.counts) / work.replicas
    forward, backward, both = (costs @ modules for costs in work.of_rows(positions / work.stages))
    onward = forward[:, :-1] + _transfers(work, layout.decoder_state_forward)
    back = backward[:, :-1] + _transfers(work, layout.decoder_state_backward)
    latencies = np.append(work.links.latency_ns.min(axis=0), 0.0)
    least_onward = work.forward @ modules + latencies
    least_back = work.backward @ modules + latencies
    for stage in range(work.stages):
        at_stage = both[:, stage :: work.stages].sum(axis=1)
        way_there = onward[:, :stage].sum(axis=1)
        if work.divides:
            yield way_there, forward[:, 0], at_stage, 0.0
            continue
        way_back = back[:, :stage].sum(axis=1)
        yield way_there, forward[:, 0], at_stage, least_back[:stage].sum()
        yield way_back, backward[:, 0], at_stage, least_onward[:stage].sum()


def _transfers(work: StageWork, with_decoder: Sequence[bool]) -> Floats:
    """What rows take from each virtual stage to the next: `[shares + 1, virtual stages - 1]`."""
    links = work.links
    targets = _with_pairs(work, work.targets)[:, None] * np.array(with_decoder, np.int64)
    positions = _with_pairs(work, work.inputs)[:, None] + targets
    by_position = (8 * work.sent_per_position / links.gbps).min(axis=0)
    latencies = links.latency_ns.min(axis=0)
    return np.concatenate([positions * by_position, latencies[None]])


def _with_pairs(work: StageWork, values: IntArray) -> IntArray:
    """Values by sample for all shares: pairs of positions have none."""
    return np.concatenate([values, np.zeros_like(values)]) if work.cut else values


def _parts(work: StageWork) -> Floats:
    """How often a replica has every share."""
    return np.asarray(np.tile(work.counts, 1 + work.cut) / work.replicas)


def _of_stage(work: StageWork, way: Floats, first: Floats, at_stage: Floats) -> float:
    """The least over numbers of rows of one stage's bound."""
    if not (np.isfinite(way).all() and np.isfinite(at_stage).all() and at_stage[:-1].any()):
        return 0.0  # a sample of which nothing is known, or nothing to do
    charges, alone = _charges(work, way, first, at_stage)
    parts = _parts(work)
    bounds = alone + charges @ parts
    if work.replicas == 1:
        return float(bounds.min())
    measure = charges[bounds.argmin()]
    counted = measure > 0
    least = (charges[:, counted] / measure[counted]).min(axis=1)
    bounds = alone + least * (measure @ parts)
    return float(bounds.min())


def _charges(work: StageWork, way: Floats, first: Floats, at_stage: Floats) -> tuple[Floats, Floats]:
    """What shares are charged by numbers of rows, `[numbers, shares]`, and what these rows pay: `[numbers]`."""
    paid = SHORT / (SHORT + work.rounded_up)
    alone_in_row = at_stage[-1]
    way, first, at_stage = (np.append(of[:-1], of[-1] * paid) for of in (way, first, at_stage))
    rows = np.arange(1, MOST + 1)[:, None]
    shares = at_stage[:-1]
    all_alone = at_stage[-1] * rows[:, 0]
    if way[:-1].any():
        charges, alone = _by_rows(rows, _parts(work), way, first, at_stage)
    else:
        charges = np.repeat(shares[None], MOST, axis=0)
        alone = all_alone
    if not work.rounded_up:
        return charges, alone
    part = _part_of_short(work, shares, alone_in_row)
    in_short = shares / part
    of_all = min(LIKE_OTHERS * part, 1.0)
    charges = (1 - of_all) * charges + of_all * shares
    charges = np.minimum(charges, of_all * in_short)
    alone = (1 - of_all) * alone + of_all * all_alone
    return np.concatenate([charges, in_short[None]]), np.append(alone, 0.0)


def _part_of_short(work: StageWork, shares: Floats, alone: float) -> float:
    """The most that a short row takes for its shares, of its time; the last pieces have twice the pairs of others."""
    by_position = alone / (SHORT + work.rounded_up)
    samples = len(work.inputs)
    most = shares[:samples] + 2 * shares[samples:] if work.cut else shares
    whole = most + by_position * (work.inputs + work.targets)
    takes = whole > 0
    return float((most[takes] / whole[takes]).max())


def _by_rows(rows: IntArray, parts: Floats, way: Floats, first: Floats, at_stage: Floats) -> tuple[Floats, Floats]:
    """`_charges` of a stage that is not the first, all rows counting as such."""
    goes = way[:-1] > 0
    share = (first[:-1][goes] / way[:-1][goes]).min()
    first = np.append(share * way[:-1], first[-1])
    rest = at_stage - first
    of_way, of_rest = (float(of[:-1] @ parts) for of in (way, rest))
    falls = min(of_way / max(of_way + of_rest, 1.0), _SLOWEST)
    whole = 1 - falls**rows
    at_first = (way * (1 - falls) - rest * falls)[:-1] / whole  # in the first row, above what all would charge in time
    at_last = at_first * falls ** (rows - 1)
    charges = first[:-1] + rest[:-1] / whole + np.minimum(at_first, at_last)
    charges[-1] = np.minimum(charges[-1], at_stage[:-1])
    weights = (rows - falls * whole / (1 - falls)) / whole  # Σ P_k
    alone = way[-1] + first[-1] * (rows - weights) + at_stage[-1] * weights
    return charges, alone[:, 0]
