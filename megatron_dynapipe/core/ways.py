"""Ways to make a batch's micro-batches, and the fastest of what they propose.

    samples, problem ── ways ──► candidates ── start every one ──► the promising ── search ──► the fastest schedule

A way (`ways`) proposes candidates, `best` decides among them: by where their searches start, and by what these find.
Rules of transfers under which a candidate has no order are relaxed here, and nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Protocol

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import InfeasibleError, StallError
from megatron_dynapipe.core.native import FEW_ROWS
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import OrderedPartitions
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.scheduling import ScheduledBatch, schedule_batch, searched
from megatron_dynapipe.core.search import Start, start
from megatron_dynapipe.core.units import BatchLayout

LEAST_GAIN = 0.01
"""A candidate is searched, too, if its start is faster than that of any before it by this share."""
MARGIN_OF_FEW = 0.25
"""If the default has few rows, a candidate's start may be slower by this share: such starts tell little."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One way to make the micro-batches of a batch, ready to be searched.

    Attributes:
        samples: what its micro-batches hold.
        problem: the problem of planning them.
        partitioned: what a search starts with; without partitions, packed rows that it makes itself.
        fallback: makes what it starts with where it finds nothing from those; None for nothing else.
        searchable: whether a search may change the partitions.
        is_default: whether it is searched unless another one starts ahead of it by `LEAST_GAIN`.
        spread: makes a schedule of all replicas, and what it holds, of one made for several in step or next to teams.
        takes: the time of all that `spread` makes, by the time of what its problem has of it.
        missed: what users are told where nothing is found of it, though they asked for it.
    """

    samples: Samples
    problem: BatchProblem
    partitioned: OrderedPartitions
    fallback: Callable[[], OrderedPartitions] | None = None
    searchable: bool = True
    is_default: bool = False
    spread: Callable[[ScheduledBatch], tuple[Samples, ScheduledBatch]] | None = None
    missed: str = ""
    takes: Callable[[int], int] = int

    def unfit(self) -> InfeasibleError | None:
        """Why no plan can have these micro-batches, where that is known of them alone."""
        return None

    @cached_property
    def _problems(self) -> list[BatchProblem]:
        """The problem under its rules of transfers, and under each that may be tried where every order stalls."""
        return [self.problem, *(replace(self.problem, transfers=r) for r in self.problem.transfers.relaxed())]

    def start(self, most: int | None = None) -> Start | None:
        """The start of a search, by the first rules of transfers that allow any; None as `search.start` returns it."""
        starts = (start(problem, self.partitioned, most) for problem in self._problems)
        return next((found for found in starts if found is not None), None)

    def scheduled(self, chosen: ScheduleSettings) -> ScheduledBatch | None:
        """The fastest schedule found by the first rules of transfers under which there is one; None where none fits.

        Raises:
            StallError: every order stalls by all rules.
        """
        found = self._scheduled_from(self.partitioned, chosen)
        if found is None and self.fallback is not None:
            found = self._scheduled_from(self.fallback(), chosen)
        return found

    def _scheduled_from(self, partitioned: OrderedPartitions, chosen: ScheduleSettings) -> ScheduledBatch | None:
        # A search that starts with packed rows drops orders that stall without a word, as it drops what lacks memory.
        rows_alone = BatchLayout.PADDED not in self.problem.batch_layouts or self.problem.chains is not None
        stalled: StallError | None = None
        for problem in self._problems:
            try:
                found = schedule_batch(problem, partitioned, chosen, searchable=self.searchable)
            except StallError as error:
                stalled = error
                continue
            if found is not None or not rows_alone:
                return found
            stalled = None
        if stalled is not None:
            raise stalled
        return None


class Way(Protocol):
    """A way to make micro-batches; `ways` has the ones that a run's settings choose."""

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """What it proposes for a batch; nothing where it does not apply.

        Args:
            samples: the batch's.
            problem: the problem of planning them whole, over as many replicas as are planned apart.
        """
        ...


def best(candidates: Sequence[Candidate], chosen: ScheduleSettings) -> tuple[Candidate, ScheduledBatch] | None:
    """The candidate of the fastest schedule, and that schedule; None where none of them fits the memory.

    Two are searched: the default, and the other one that is ahead where searches start, if there is one. The default
    is left out if it cannot be faster than the other, the other if the default follows a precedent.

    Raises:
        StallError: every order of one that is searched stalls.
    """
    default = next((candidate for candidate in candidates if candidate.is_default), None)
    if default is not None and default.problem.precedents:
        following = searched(default.problem, default.partitioned, chosen, following=True)
        if following is not None:
            return default, following
    ahead = default if len(candidates) == 1 and default is not None else _ahead(candidates)
    found: tuple[Candidate, ScheduledBatch] | None = None
    least = inf
    for candidate in dict.fromkeys((ahead, default)):
        if candidate is None or candidate.takes(0) >= least:
            continue
        if (scheduled := candidate.scheduled(chosen)) is None:
            continue
        if (takes := candidate.takes(scheduled.makespan_ns)) < least:
            found = candidate, scheduled
            least = takes
    return found


def _ahead(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate that is ahead where searches start; None where none can."""
    ahead: Candidate | None = None
    least: int | None = None
    for candidate in candidates:
        started = candidate.start(least) if least is None or candidate.takes(0) < least else None
        takes = 0 if started is None else candidate.takes(started.makespan_ns)
        if started is None or (least is not None and takes >= least):
            continue
        ahead = candidate
        is_of_few = candidate.is_default and started.rows <= FEW_ROWS
        least = int(takes * (1 + MARGIN_OF_FEW if is_of_few else 1 - LEAST_GAIN))
    return ahead
