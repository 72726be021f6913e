"""Measuring a model within a budget of time: points that all ranks agree on, one after another, until all is smooth."""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_dynapipe.cost.adaptive import AdaptiveGrid
from megatron_dynapipe.cost.tabulate import Range
from megatron_dynapipe.integration.profiling.journal import Journal, Measurement
from megatron_dynapipe.integration.profiling.layers import Part, Point
from megatron_dynapipe.integration.profiling.measure import measure
from megatron_dynapipe.integration.profiling.ranks import (
    Values,
    at_once,
    communicable,
    largest_that_fits,
    measured_by_ranks,
)
from megatron_dynapipe.runtime.platform import DevicePlatform
from megatron_dynapipe.units import NS_PER_MS, Recompute

SMOOTH_ENOUGH = 0.08
"""Expected error times distance (in octaves) below which no point is worth measuring any more."""
LONGEST_SHARE = 0.01
"""Of the budget, that one forward and backward may take; longer ones are extrapolated."""

_STOP = -1
_WORDS = 5
"""Of a choice: index, dimensions, and up to three of these."""

Surface = tuple[str, Recompute]
Choice = tuple[int, Point]
"""Number of a surface, and where it is measured."""


@dataclass(slots=True, kw_only=True)
class Profiler:
    """One running profile.

    Attributes:
        parts: what is measured, by name.
        modes: recompute modes of the layers; embedding and head have none.
        within: the micro-batches that a run may ask for.
        most_positions: of one micro-batch that is measured.
        platform: the device's clock.
        journal: keeps the measurements; those found in it are not repeated.
        shared: whether ranks share the layers; if not, each measures points of its own.
        hurried: as in `measure`.
    """

    parts: Mapping[str, Part]
    modes: Sequence[Recompute]
    within: Range
    most_positions: int
    platform: DevicePlatform
    journal: Journal
    shared: bool = False
    hurried: bool = False
    grids: dict[Surface, AdaptiveGrid] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.parts:
            for mode in self.modes if name in ("encoder", "decoder") else [Recompute.NONE]:
                axes = self.within.axes(name)
                self.grids[name, mode] = AdaptiveGrid(axes, most_positions=self.most_positions)
        for measurement in self.journal.found:
            self._note(measurement)

    def run(self, budget_s: float, *, seconds: Callable[[], float] = time.monotonic) -> Iterator[Measurement]:
        """Measure until the budget is spent or every surface is known well enough; each measurement as it is made."""
        end = seconds() + budget_s
        for turn in itertools.count():
            choices = _agreed(self._choose(budget_s) if seconds() < end or self._is_bare() else [])
            if not choices:
                return
            for measurement in self._measured(choices, turn):
                self._note(measurement)
                self.journal.add(measurement)
                yield measurement

    def _is_bare(self) -> bool:
        """Whether a surface lacks one of the points to begin with, without which a model would be a guess."""
        return any(self._lacks(surface) for surface in self.grids)

    def _lacks(self, surface: Surface) -> bool:
        grid = self.grids[surface]
        return not grid.measured if surface[0] == "embedding" else grid.lacks_first

    def _choose(self, budget_s: float) -> list[Choice]:
        """The points most worth measuring at the same time, of as many surfaces; first those to begin with."""
        worth: list[tuple[float, int, Point]] = []
        is_bare = self._is_bare()
        for index, (surface, grid) in enumerate(self.grids.items()):
            if is_bare and not self._lacks(surface):
                continue  # what is next takes a fit
            name, _ = surface
            found = grid.next(longest_ms=budget_s * 1e3 * LONGEST_SHARE / self.parts[name].layers)
            enough = math.inf if name == "embedding" and grid.measured else SMOOTH_ENOUGH
            if found is not None and found[1] >= enough:
                worth.append((found[1], -index, found[0]))
        best = heapq.nlargest(at_once(shared=self.shared), worth)
        return [(-index, point) for _, index, point in best]

    def _measured(self, choices: Sequence[Choice], turn: int) -> list[Measurement]:
        surfaces = list(self.grids)
        measures = [partial(self._measure, *surfaces[index], point) for index, point in choices]
        found = measured_by_ranks(measures, turn=turn, shared=self.shared)
        return [
            _measurement(*surfaces[index], point, values) for (index, point), values in zip(choices, found, strict=True)
        ]

    def _measure(self, name: str, mode: Recompute, point: Point) -> Values | None:
        part = self.parts[name]
        if name in ("encoder", "decoder"):
            part.set_recompute(mode)
        run = partial(measure, point=point, platform=self.platform, shared=self.shared, hurried=self.hurried)
        return largest_that_fits(part, run, shared=self.shared)

    def _note(self, measurement: Measurement) -> None:
        grid = self.grids.get((measurement.part, measurement.recompute))
        if grid is None:
            return  # of a journal of more modes
        self.measurements.append(measurement)
        if measurement.fits:
            times = measurement.forward_ns / NS_PER_MS, measurement.backward_ns / NS_PER_MS
            grid.add(measurement.point, *times)
        else:
            grid.add_infeasible(measurement.point)


def _measurement(name: str, mode: Recompute, point: Point, values: Values | None) -> Measurement:
    if values is None:
        return Measurement(part=name, recompute=mode, point=point, fits=False)
    forward, backward, stored, peak = values
    return Measurement(
        part=name,
        recompute=mode,
        point=point,
        forward_ns=forward,
        backward_ns=backward,
        stored_bytes=stored,
        peak_bytes=peak,
    )


def _agreed(choices: Sequence[Choice]) -> list[Choice]:
    """Rank 0's choices on all ranks: clocks differ, and layers shared by ranks must be run by all of them."""
    count = dist.get_world_size()
    words = torch.full((count, _WORDS), _STOP, dtype=torch.int64)
    for row, (index, point) in zip(words, choices, strict=False):
        row[: len(point) + 2] = torch.tensor([index, len(point), *point])
    words = words.to(communicable())
    dist.broadcast(words, 0)
    rows = [[int(word) for word in row] for row in words.tolist()]
    return [(row[0], tuple(row[2 : 2 + row[1]])) for row in rows if row[0] != _STOP]
