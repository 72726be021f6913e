"""Ranks that are slower than they should be, from the traces of their passes.

A rank's slowness is the time that its passes took over the time that was predicted for them. Where all devices are
alike it is the same on all ranks, whatever their stages hold; costs that are wrong are wrong for all. A rank is slow
whose slowness is well above the median of the others.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.elastic.job import Job
from megatron_dynapipe.plan.instructions import Backward, Forward
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.runtime import Trace
from megatron_dynapipe.runtime.control_group import ControlGroup

WINDOW = 20
"""Iterations over which a rank is judged."""
FACTOR = 1.5
"""Of the median, from which a rank is named."""


class SlowRanks:
    """Compares all ranks after every `WINDOW` iterations, without waiting for any; every rank has one.

    Args:
        control: the group of all ranks.
        job: of `launch`; None names slow ranks, and does no more.
        window: iterations.
    """

    def __init__(self, control: ControlGroup, job: Job | None, *, window: int = WINDOW) -> None:
        self._control, self._window = control, window
        self._factor = FACTOR if job is None or job.exclude_slow is None else job.exclude_slow
        self._excluded = None if job is None or job.exclude_slow is None else Path(job.slow_file)
        self._latest: tuple[PlannedIteration, Trace] | None = None
        self._measured = self._predicted = self._count = 0
        self._gathered: Callable[[], list[torch.Tensor]] | None = None
        self._named: tuple[int, ...] = ()

    def add(self, item: PlannedIteration, trace: Trace) -> None:
        """An iteration has been issued; the one before it is read, since the device is done with it."""
        if self._gathered is not None:
            self._judge([float(value) for value in self._gathered()])
            self._gathered = None
        if self._latest is not None:
            before, events = self._latest[0], self._latest[1].events()
            self._measured += passes_ns(events)
            self._predicted += passes_ns(before.entry.stage_plan.predicted)
            self._count += 1
        self._latest = item, trace
        if self._count == self._window:
            slowness = self._measured / self._predicted if self._predicted else 0.0
            self._gathered = self._control.start_gather(torch.tensor([slowness], dtype=torch.float64))
            self._measured = self._predicted = self._count = 0

    def _judge(self, slowness: Sequence[float]) -> None:
        """Name the ranks that have become slow, on rank 0; tell the own agent, if it is to know."""
        found = slow_ranks(slowness, self._factor)
        times = {rank: f"rank {rank} takes {factor:.1f} of the median time" for rank, factor in found.items()}
        if self._control.rank == 0 and tuple(found) != self._named and found:
            print(f"slow ranks: {'; '.join(times.values())} for its passes", flush=True)
        self._named = tuple(found)
        if self._excluded is not None:
            if self._control.rank in times:
                self._excluded.write_text(times[self._control.rank])
            else:
                self._excluded.unlink(missing_ok=True)


def slow_ranks(slowness: Sequence[float], factor: float) -> dict[int, float]:
    """Ranks whose slowness is at least `factor` times the median of the others, and how much of it; 0: it had no pass.

    The median of the *other* ranks: of two ranks, one must be found slow.
    """
    found = {}
    for rank, own in enumerate(slowness):
        others = [value for at, value in enumerate(slowness) if at != rank and value > 0]
        if others and own >= factor * statistics.median(others):
            found[rank] = own / statistics.median(others)
    return found


def passes_ns(events: Sequence[Event]) -> int:
    """Time of the forwards and backwards among the events."""
    return sum(event.end_ns - event.start_ns for event in events if isinstance(event.instruction, Forward | Backward))
