"""Measuring a model within a budget of time: one point after another, agreed by all ranks, until all is smooth."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_dynapipe.cost.adaptive import AdaptiveGrid
from megatron_dynapipe.cost.tabulate import Range
from megatron_dynapipe.integration.profiling.journal import Journal, Measurement
from megatron_dynapipe.integration.profiling.layers import Part, Point
from megatron_dynapipe.integration.profiling.measure import Sample, measure
from megatron_dynapipe.runtime.platform import DevicePlatform
from megatron_dynapipe.units import NS_PER_MS, Recompute

SMOOTH_ENOUGH = 0.08
"""Expected error times distance (in octaves) below which no point is worth measuring any more."""
LONGEST_SHARE = 0.01
"""Of the budget, that one forward and backward may take; longer ones are extrapolated."""

_STOP = -1

Surface = tuple[str, Recompute]


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
        shared: whether ranks share the layers.
    """

    parts: Mapping[str, Part]
    modes: Sequence[Recompute]
    within: Range
    most_positions: int
    platform: DevicePlatform
    journal: Journal
    shared: bool = False
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
        surfaces = list(self.grids)
        while True:
            chosen = self._choose(budget_s) if seconds() < end or self._is_bare() else None
            index, point = _agreed(None if chosen is None else (surfaces.index(chosen[0]), chosen[1]))
            if index == _STOP:
                return
            name, mode = surfaces[index]
            measurement = self._measure(name, mode, point)
            self._note(measurement)
            self.journal.add(measurement)
            yield measurement

    def _is_bare(self) -> bool:
        """Whether some surface has no point at all, so that no model could be made yet."""
        return any(not grid.measured for grid in self.grids.values())

    def _choose(self, budget_s: float) -> tuple[Surface, Point] | None:
        best: tuple[float, Surface, Point] | None = None
        for surface, grid in self.grids.items():
            found = grid.next(longest_ms=budget_s * 1e3 * LONGEST_SHARE / self.parts[surface[0]].layers)
            enough = math.inf if surface[0] == "embedding" and grid.measured else SMOOTH_ENOUGH
            if found is not None and found[1] >= enough and (best is None or found[1] > best[0]):
                best = found[1], surface, found[0]
        return None if best is None else (best[1], best[2])

    def _measure(self, name: str, mode: Recompute, point: Point) -> Measurement:
        part = self.parts[name]
        if name in ("encoder", "decoder"):
            part.set_recompute(mode)
        values = largest_that_fits(part, lambda each: measure(each, point, self.platform, shared=self.shared))
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


def _agreed(choice: tuple[int, Point] | None) -> tuple[int, Point]:
    """Rank 0's choice on all ranks: clocks differ, and layers shared by ranks must be run by all of them."""
    words = torch.full((5,), _STOP, dtype=torch.int64)
    if choice is not None:
        index, point = choice
        words[: len(point) + 2] = torch.tensor([index, len(point), *point])
    words = words.to(communicable())
    dist.broadcast(words, 0)
    index, length, *rest = (int(word) for word in words.tolist())
    return index, tuple(rest[: max(length, 0)])


def largest_that_fits(part: Part, run: Callable[[Part], Sample]) -> tuple[int, ...] | None:
    """What measuring the part gives over all ranks; with a single layer where several do not fit on one of them."""
    for each in part.from_most_layers:
        try:
            sample: Sample | None = run(each)
        except torch.OutOfMemoryError:
            sample = None
        values = over_ranks(sample)
        if values is not None:
            return values
    return None


def over_ranks(sample: Sample | None) -> tuple[int, ...] | None:
    """Mean times and largest memory over the ranks; None where it did not fit on one of them."""
    memory = None if sample is None else sample.memory
    fits = torch.tensor([memory is not None], dtype=torch.int64, device=communicable())
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    if not fits.item() or sample is None or memory is None:
        return None
    times = torch.tensor([sample.forward_ns, sample.backward_ns], device=communicable())
    dist.all_reduce(times)
    sizes = torch.tensor([memory.stored_bytes, memory.peak_bytes], device=communicable())
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    return *(int(time) // dist.get_world_size() for time in times), *(int(size) for size in sizes)


def communicable() -> torch.device:
    """Where tensors of the default group live."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
