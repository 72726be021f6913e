"""Measuring a model within a budget of time: points that all ranks agree on, one after another, until all is smooth."""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_dynapipe.core.costs import LAYER_KINDS
from megatron_dynapipe.core.units import NS_PER_MS, Recompute
from megatron_dynapipe.costing.adaptive import RefinedGrid
from megatron_dynapipe.costing.tabulate import grid_axes
from megatron_dynapipe.megatron.profiling.layers import Point
from megatron_dynapipe.megatron.profiling.measure import Scope, Values, at_once, communicable, measured_by_ranks

SMOOTH_ENOUGH = 0.08
"""Expected error times distance (in octaves) below which no point is worth measuring any more."""
LONGEST_SHARE = 0.01
"""The share of the budget that one forward and backward may take; longer ones are extrapolated."""

_STOP = -1
_NUMBERS = 5
"""A choice: index, dimensions, and up to three of these."""

Surface = tuple[str, Recompute]
NextPoint = tuple[int, Point]
"""Number of a surface, and where it is measured."""


Measurements = dict[tuple[Surface, Point], Values | None]
"""None where memory ran out."""


class Profiler:
    """One running profile, and the measurements made so far."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._grids: dict[Surface, RefinedGrid] = {}
        self.measurements: Measurements = {}
        for name in scope.parts:
            for mode in scope.modes if name in LAYER_KINDS else [Recompute.NONE]:
                axes = grid_axes(name, scope.within)
                self._grids[name, mode] = RefinedGrid(axes, most_positions=scope.most_positions)

    def run(self, budget_s: float, *, seconds: Callable[[], float] = time.monotonic) -> Iterator[Surface]:
        """Measure until the budget is spent or every surface is known well enough; the surface of each measurement."""
        end = seconds() + budget_s
        for turn in itertools.count():
            choices = _agreed(self._choose(budget_s) if seconds() < end or self._is_bare() else [])
            if not choices:
                return
            surfaces = list(self._grids)
            measures = [partial(self._measure, *surfaces[index], point) for index, point in choices]
            results = measured_by_ranks(measures, turn=turn, shared=self._scope.shared)
            for (index, point), values in zip(choices, results, strict=True):
                self._note(surfaces[index], point, values)
                yield surfaces[index]

    def _is_bare(self) -> bool:
        """Whether a surface lacks one of the points to begin with, without which a model would be a guess."""
        return any(grid.lacks_first for grid in self._grids.values())

    def _choose(self, budget_s: float) -> list[NextPoint]:
        """The points most worth measuring at the same time, of as many surfaces; first those to begin with."""
        worth: list[tuple[float, int, Point]] = []
        is_bare = self._is_bare()
        for index, (surface, grid) in enumerate(self._grids.items()):
            if is_bare and not grid.lacks_first:
                continue  # what is next takes a fit
            name, _ = surface
            best = grid.next(longest_ms=budget_s * 1e3 * LONGEST_SHARE / self._scope.parts[name].layers)
            if best is not None and best[1] >= SMOOTH_ENOUGH:
                worth.append((best[1], -index, best[0]))
        largest = heapq.nlargest(at_once(shared=self._scope.shared), worth)
        return [(-index, point) for _, index, point in largest]

    def _measure(self, name: str, mode: Recompute, point: Point) -> Values | None:
        part = self._scope.parts[name]
        if name in LAYER_KINDS:
            part.set_recompute(mode)
        return self._scope.measure(part, point)

    def _note(self, surface: Surface, point: Point, values: Values | None) -> None:
        self.measurements[surface, point] = values
        if values is None:
            self._grids[surface].add_infeasible(point)
        else:
            self._grids[surface].add(point, values.forward_ns / NS_PER_MS, values.backward_ns / NS_PER_MS)


def _agreed(choices: Sequence[NextPoint]) -> list[NextPoint]:
    """Rank 0's choices on all ranks: clocks differ, and layers shared by ranks must be run by all of them."""
    count = dist.get_world_size()
    numbers = torch.full((count, _NUMBERS), _STOP, dtype=torch.int64)
    for row, (index, point) in zip(numbers, choices, strict=False):
        row[: len(point) + 2] = torch.tensor([index, len(point), *point])
    numbers = numbers.to(communicable())
    dist.broadcast(numbers, 0)
    rows = [list(map(int, row)) for row in numbers.tolist()]
    return [(row[0], tuple(row[2 : 2 + row[1]])) for row in rows if row[0] != _STOP]
