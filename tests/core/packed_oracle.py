"""Packed rows without the planner: their costs by the rule alone, and the best rows that trying everything finds."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations, product

import numpy as np

from megatron_dynapipe.core.orders import adaptive
from megatron_dynapipe.core.problem import BatchProblem, IntArray, ScheduleProblem
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, round_up
from megatron_dynapipe.costing import ABSENT, CostTables


def derived_costs(tables: CostTables, inputs: IntArray, targets: IntArray) -> list[Fraction] | None:
    """Modules' costs of a row, each the sum over samples of 1/b of a padded micro-batch of b samples like it."""
    positions = round_up(int(inputs.sum())) + round_up(int(targets.sum()))
    by_size = tables.at_lengths(inputs, targets, separate=True).reshape(len(inputs), -1, len(tables.sizes))
    sizes = tables.sizes.tolist()
    sums = [Fraction(0)] * by_size.shape[1]
    for costs, own in zip(by_size.tolist(), (inputs + targets).tolist(), strict=True):
        b = max(Fraction(positions, own), Fraction(1))
        for row in range(len(sums)):
            points = dict(zip(sizes, costs[row], strict=True))
            if points[sizes[0]] == ABSENT:
                return None
            sums[row] += Fraction(points[sizes[0]]) / b if b < sizes[0] else _share(points, b)
    return sums


def _share(points: dict[int, int], b: Fraction) -> Fraction:
    sizes = sorted(points)
    below, above = [s for s in sizes if s <= b], [s for s in sizes if s > b]
    low = below[-1]
    if points[low] != ABSENT and (low == b or (above and points[above[0]] != ABSENT)):
        if low == b or not above:
            return Fraction(points[low]) / b
        value = points[low] + (points[above[0]] - points[low]) * (b - low) / (above[0] - low)
        return Fraction(value) / b
    largest = max(s for s in below if points[s] != ABSENT)
    return Fraction(points[largest], largest)


def best_makespan_ns(problem: BatchProblem) -> int | None:
    """The least makespan over all ways to put samples into packed rows, modes and orders; None where nothing fits.

    For one replica and few samples. Passes are ordered as `adaptive` orders them.
    """
    best = None
    for rows in set_partitions(list(range(len(problem.inputs)))):
        members = [np.array(row, np.int64) for row in rows]
        for modes in product(range(len(problem.modes)), repeat=len(rows)):
            packed = [BatchLayout.PACKED] * len(rows)
            costs, covered = problem.costs_of(members, packed, np.array(modes, np.int64))
            if not covered.all():
                continue
            for order in permutations(range(len(rows))):
                makespan = _makespan(costs.take(order))
                if makespan is not None and (best is None or makespan < best):
                    best = makespan
    return best


def _makespan(costs: ScheduleProblem) -> int | None:
    run = simulate(costs, adaptive(costs))
    return int(run.makespan_ns) if max(run.peak_bytes) <= costs.memory_limit_bytes else None


def set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to split items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in set_partitions(rest):
        yield [[first], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [first, *groups[i]], *groups[i + 1 :]]
