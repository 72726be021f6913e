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
NEAR, FAR = 0.1, 0.5
"""The next one is, too, if its start is slower by the first share; the default is not if its is, by the second."""
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

    The default is searched, and others that are ahead of it where searches start: the one ahead of all and, if it is
    near, the next. The default is left out if it starts far behind, the others if it follows a precedent.

    Raises:
        StallError: every order of one that is searched stalls.
    """
    default = next((candidate for candidate in candidates if candidate.is_default), None)
    if default is not None and default.problem.precedents:
        following = searched(default.problem, default.partitioned, chosen, following=True)
        if following is not None:
            return default, following
    found: tuple[Candidate, ScheduledBatch] | None = None
    least = inf
    for candidate in dict.fromkeys(candidates if len(candidates) == 1 else _promising(candidates)):
        if candidate.takes(0) >= least:
            continue
        scheduled = candidate.scheduled(chosen)
        if scheduled is not None and (takes := candidate.takes(scheduled.makespan_ns)) < least:
            found, least = (candidate, scheduled), takes
    return found


def _promising(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """What is ahead where searches start, the next of other pieces if it is near, and the default unless it is far.

    Pieces of one size that are cut for different modes are nearly the same; where the best size starts near another,
    starts do not tell which of them ends first.
    """
    starts: dict[Candidate, float] = {}
    for candidate in candidates:
        least = min(starts.values(), default=inf)
        if candidate.takes(0) >= least:
            continue
        start = candidate.start(None if least == inf else int(least * (1 + NEAR)))
        if start is not None:
            margin = MARGIN_OF_FEW if start.rows <= FEW_ROWS else -LEAST_GAIN
            starts[candidate] = candidate.takes(start.makespan_ns) * (1 + margin * candidate.is_default)
    default = [candidate for candidate in candidates if candidate.is_default]
    order = sorted(starts, key=starts.__getitem__)
    if not order or order[0].is_default:
        return default
    ahead = order[0]
    pieces, least = len(ahead.samples.ids), starts[ahead]
    near = [
        candidate
        for candidate in order
        if len(candidate.samples.ids) != pieces and starts[candidate] <= least * (1 + NEAR)
    ]
    not_far = [candidate for candidate in default if starts.get(candidate, 0) <= least * (1 + FAR)]
    return [ahead, *near[:1], *not_far]
