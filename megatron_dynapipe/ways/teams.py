"""Long samples on teams of replicas, each its share of every sample; the other samples next to them or afterwards.

    samples, longest first    900 700 | 300 200 180 150 90 40 …        a team of two, of four replicas
    replicas 0 and 1          shares of 900, 700
    replicas 2 and 3          300, 200, … as without teams: whole or in pieces, padded or packed

    samples, longest first    900 | 300 280 | 200 180 90 40 …          a team of four, then two of two, then each alone
    replicas 0 to 3           a share of 900; of 300 or of 280; 200, 180, … as without teams

A team is planned as one replica whose samples cost what shares do (`costing.shares`), in packed rows; other samples are
planned as a batch of their own, by the other ways, and, if all replicas run them, in smaller teams, too. How many teams
there are, of what size, and which samples they run, is chosen by the work of samples alone; searches start from the
best choices. Without a long sample, or a choice that promises `LEAST_GAIN`, nothing is started.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain, product, zip_longest
from typing import Any

import msgspec
import numpy as np

from megatron_dynapipe.core.batch import Samples, round_up_all
from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.orders import Schedule, predict
from megatron_dynapipe.core.partition import OrderedPartitions, by_length
from megatron_dynapipe.core.problem import BatchProblem, IntArray, ScheduleProblem
from megatron_dynapipe.core.scheduling import ScheduledBatch
from megatron_dynapipe.core.search import notice
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.core.ways import LEAST_GAIN, Candidate, Way
from megatron_dynapipe.costing.shares import latency_ns, share_costs, with_latency
from megatron_dynapipe.ways.pieces import can_cut, problem_of
from megatron_dynapipe.ways.teams_rule import team_sizes

LONG = 0.5
"""Of a replica's part of the work: where every sample fits and has less of it, no teams are tried."""
ROW = 4096
"""Positions of a row that a short sample is taken to be a part of."""
STARTED = 2
"""Choices of teams with others next to them that searches start from, and one with others after them."""
NEAR = 0.1
"""If the second one promises to take longer by this share, the first alone is."""
SURE = 0.9
"""No plan takes less than this part of its samples' work by itself; where that is more than another plan takes, none is
started."""
Choice = tuple[int, int, int, int]
"""(size, teams, samples, others): so many teams of that size run the samples of most work, and so many replicas the
others: those that are in no team, or afterwards all of them."""
Planned = tuple[Samples, ScheduledBatch]
"""What micro-batches hold, and these with their orders."""


class Teams:
    """Other ways, and these ways for the samples that teams leave."""

    def __init__(self, settings: PlannerSettings, ways: Sequence[Way]) -> None:
        self._settings = settings
        self._ways = ways

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """The other ways' for all samples; and, where that promises to be faster, next to teams or after them."""
        if not can_cut(problem):
            notice("no teams of replicas: the cost model does not say how wide keys are")
        if problem.forward_only or not can_cut(problem):
            return self._proposed(samples, problem)
        least, alone = _stage_times(problem)
        if not self._has_long(alone):
            return self._proposed(samples, problem)
        sizes = team_sizes(self._settings.context_teams)
        shared = {ranks: self._shared(samples, problem, ranks) for ranks in sizes}
        times = {ranks: _stage_times(one.problem)[1] for ranks, one in shared.items()}
        return self._candidates(samples, problem, shared, {0: least, 1: alone} | times)

    def _has_long(self, alone: IntArray) -> bool:
        by_sample = alone.sum(axis=1)
        is_short = by_sample.max() * self._settings.data_parallel < LONG * by_sample.sum()
        all_fit = by_sample.min() > 0
        return not (all_fit and is_short)

    def _candidates(
        self, samples: Samples, problem: BatchProblem, shared: dict[int, Candidate], work: dict[int, IntArray]
    ) -> Sequence[Candidate]:
        """As `candidates`; those that surely gain come first, so that the start of any other is compared with theirs.

        Args:
            samples: of a batch, or what teams leave of it.
            problem: of planning them.
            shared: by ranks, all samples in shares, on one team.
            work: as `choices_of`; of 0 what whole samples take at least, in any memory.
        """
        bound = SURE * _rest_times(work[0], problem.replicas, fills=False)[0]
        least_ns = 0 if bound == np.inf else int(bound)
        takes = partial(max, least_ns)
        proposed = self._proposed(samples, problem)
        others = [replace(candidate, takes=takes) for candidate in proposed]
        if not shared or not self._has_long(work[1]):
            return others
        order = np.lexsort((np.arange(len(work[1])), -work[max(work)].sum(axis=1)))
        choices = choices_of(
            {ranks: work[ranks] for ranks in (1, *shared)},
            order,
            self._settings.data_parallel,
        )
        teams: list[Candidate] = []
        for _, choice in choices:
            teams += self._with_teams(samples, problem, shared, work, choice, order)
        if choices and choices[0][0] < bound:
            return [*teams, *others]
        return [*others, *teams]

    def _proposed(self, samples: Samples, problem: BatchProblem) -> list[Candidate]:
        return [*chain.from_iterable(way.candidates(samples, problem) for way in self._ways)]

    def _shared(self, samples: Samples, problem: BatchProblem, ranks: int) -> Candidate:
        """All samples in shares, on one team."""
        chunk = -(-samples.input_positions // (2 * ranks))
        labels = samples.labels
        if labels is not None:  # a sample's last positions: the first place, whose last chunk this is, has most
            in_first = np.maximum(labels - (2 * ranks - 1) * chunk, 0)
            labels = np.minimum(labels, chunk) + in_first
        positions = 2 * chunk
        entries = replace(samples, input_positions=positions, inputs=round_up_all(positions), labels=labels)
        extras = [
            share_costs(
                tables,
                mode,
                chunk=chunk,
                ranks=ranks,
                element_bytes=self._settings.element_bytes,
                network=self._settings.network,
                tensor_parallel=self._settings.tensor_parallel,
            )
            for tables, mode in zip(problem.modes, self._settings.recompute, strict=True)
        ]
        return _part(
            Candidate(
                samples=entries,
                problem=replace(problem_of(problem, entries), piece_costs=np.stack(extras)),
                partitioned=OrderedPartitions(order=by_length(entries.inputs, entries.targets)),
            ),
            np.arange(len(entries.ids)),
            1,
        )

    def _with_teams(
        self,
        samples: Samples,
        problem: BatchProblem,
        shared: dict[int, Candidate],
        work: dict[int, IntArray],
        choice: Choice,
        order: IntArray,
    ) -> Sequence[Candidate]:
        """Candidates for the samples that teams leave, next to them or after them; none where teams do not fit."""
        size, teams, count, others = choice
        once_ns = int(latency_ns(size, self._settings.network, tensor_parallel=self._settings.tensor_parallel))
        modes = zip(problem.modes, self._settings.recompute, strict=True)
        of_size = shared[size]
        of_rows = replace(of_size.problem, modes=tuple(with_latency(tables, mode, once_ns) for tables, mode in modes))
        long = np.sort(order[:count])
        team = _part(replace(of_size, problem=of_rows), long, min(teams, count))
        started = team.start()
        if started is None:
            return []
        join = partial(_joined, _at(samples, long), team, choice, self._settings)
        if count == len(order):
            return [replace(team, spread=lambda planned: join(None, planned))]
        places = np.sort(order[count:])
        rest = _at(samples, places)
        left = replace(problem_of(problem, rest), replicas=min(others, len(rest.ids)))
        is_after = others == self._settings.data_parallel
        smaller = [ranks for ranks in shared if is_after and ranks < size]
        proposed = self._candidates(
            rest,
            left,
            {ranks: _part(shared[ranks], places, 1) for ranks in smaller},
            {ranks: work[ranks][places] for ranks in (0, 1, *smaller)},
        )
        if problem.layout.stages == 1:  # on one stage pieces save memory alone, and what is left fits whole
            proposed = [candidate for candidate in proposed if candidate.problem.chains is None] or proposed
        ends = (lambda ns: ns + started.makespan_ns) if is_after else partial(max, started.makespan_ns)
        return [_beside(candidate, join, ends) for candidate in proposed]


def _beside(candidate: Candidate, join: Callable[..., Planned], ends: Callable[[int], int]) -> Candidate:
    """A candidate for the samples that teams leave as one for all samples."""

    def spread(planned: ScheduledBatch) -> Planned:
        return join(*(candidate.spread(planned) if candidate.spread else (candidate.samples, planned)))

    takes = candidate.takes
    return replace(candidate, is_default=False, missed="", takes=lambda ns: ends(takes(ns)), spread=spread)


def choices_of(work: dict[int, IntArray], order: IntArray, replicas: int) -> list[tuple[float, Choice]]:
    """Teams to start from and ns that they promise, the least first; none that gain less than `LEAST_GAIN`.

    A replica takes as long as its stage that has most work, and that of its longest sample, whose pieces run on all
    stages at once. A team's samples have no pieces: the longest one's way through the other stages comes before.

    Args:
        work: by ranks that run a sample together, ns of each sample on every stage: int64[samples, stages]; of 1 for
            whole samples, 0 for those that fit on no replica.
        order: samples, the one of most work first.
        replicas: of the run.
    """
    rest = {size: _rest_times(times[order], replicas // size, fills=size > 1) for size, times in work.items()}
    without = rest[1][0]
    found: list[tuple[float, Choice]] = []
    for size in sorted(work)[1:]:
        shares = work[size][order]
        fill = np.maximum.accumulate(shares.sum(axis=1) - shares.max(axis=1))
        longest = np.maximum.accumulate(shares.max(axis=1))
        fits = np.logical_and.accumulate(shares.min(axis=1) > 0)
        most = replicas // size
        ends: dict[tuple[int, int], Floats] = {}
        for teams in range(1, most + 1):
            in_teams = np.maximum(np.cumsum(shares, axis=0).max(axis=1) / teams, longest) + fill
            in_teams[~fits] = np.inf
            others = replicas - size * teams
            ends[teams, others] = np.maximum(in_teams, _rest_times(work[1][order], others, fills=False)[1:])
        later = np.min([times for smaller, times in rest.items() if smaller < size], axis=0)
        ends[most, replicas] = in_teams + np.where(later[1:] > 0, later[1:], np.inf)
        for (teams, others), its in ends.items():
            count = int(its.argmin())
            if its[count] < without * (1 - LEAST_GAIN):
                found.append((float(its[count]), (size, teams, count + 1, others)))
    by_rest: dict[tuple[int, ...], tuple[float, Choice]] = {}
    for promised, choice in sorted(found, reverse=True):  # of those that leave the same to others, the most promising
        left = choice[2:] if choice[3] else choice
        by_rest[left] = promised, choice
    different = sorted(by_rest.values())
    after = [each for each in different if each[1][3] == replicas][:1]
    beside = [each for each in different if each[1][3] < replicas][:STARTED]
    near = [each for each in beside if each[0] < beside[0][0] * (1 + NEAR)]
    return sorted(near + after, key=lambda each: each[0])


def _rest_times(times: IntArray, runners: int, *, fills: bool) -> Floats:
    """What the samples from each one on take, float64[samples + 1]; infinite where one fits nowhere.

    Args:
        times: of each on every stage: int64[samples, stages].
        runners: replicas or teams.
        fills: whether the longest one's way through the other stages comes before, as it has no pieces.
    """
    together = np.cumsum(times[::-1], axis=0).max(axis=1) / max(runners, 1)
    of_stage = times[::-1].max(axis=1)
    way = np.maximum.accumulate(times[::-1].sum(axis=1) - of_stage) * fills
    fits = np.logical_and.accumulate(times[::-1].min(axis=1) > 0) & (runners > 0)
    found = np.where(fits, np.maximum(together, np.maximum.accumulate(of_stage)) + way, np.inf)
    return np.append(found[::-1], 0.0)


def _stage_times(problem: BatchProblem) -> IntArray:
    """ns of each sample on every stage, by itself or in a row of samples like it, under the fastest layout and mode: of
    all that are covered, and of those that fit; 0 where there is none. int64[2, samples, stages]."""
    room = problem.memory_limit_bytes - problem.model_state_bytes
    times = np.zeros((2, len(problem.inputs), problem.layout.stages), np.int64)
    alone = np.ones_like(problem.inputs)
    filling = np.maximum(ROW // np.maximum(problem.inputs, 1), 1)
    for copies in (alone, filling):
        rows = [np.full(count, sample) for sample, count in enumerate(copies.tolist())]
        for layout, mode in product(problem.batch_layouts, range(len(problem.modes))):
            costs, covered = problem.costs_of(rows, [layout] * len(rows), np.full(len(rows), mode))
            its = costs.stage_times_ns // copies[:, None]
            fits = covered & (costs.bytes_alone <= room).all(axis=1)
            for known, usable in zip(times, (covered, fits), strict=True):
                before = known.sum(axis=1)
                better = usable & ((before == 0) | (its.sum(axis=1) < before))
                known[better] = its[better]
    return times


def _part(shared: Candidate, places: IntArray, teams: int) -> Candidate:
    """Some of the samples in shares, on so many teams."""
    entries = _at(shared.samples, places)
    extras = shared.problem.piece_costs
    assert extras is not None, "of shares"
    problem = replace(
        problem_of(shared.problem, entries),
        replicas=teams,
        batch_layouts=(BatchLayout.PACKED,),
        precedents=(),
        piece_costs=np.ascontiguousarray(extras[:, places]),
    )
    order = by_length(entries.inputs, entries.targets)
    return replace(shared, samples=entries, problem=problem, partitioned=OrderedPartitions(order=order))


def _joined(
    whole: Samples,
    team: Candidate,
    choice: Choice,
    settings: PlannerSettings,
    rest: Samples | None,
    planned: ScheduledBatch,
) -> Planned:
    """What micro-batches hold, and these with their orders: on each replica its team's, then its own.

    Args:
        whole: the teams' samples.
        team: planned as one replica for each team.
        choice: the teams.
        settings: of the planner.
        rest: what the other micro-batches hold; None where there are none.
        planned: the schedule of these, or the teams' where there are none.
    """
    of_teams = planned if rest is None else team.scheduled(settings.schedule)
    if of_teams is None:
        raise PlanningError("a search of a team's micro-batches lost the start that it had")
    size, _, _, others = choice
    shared = replace(
        whole,
        input_positions=team.samples.input_positions,
        inputs=team.samples.inputs,
        ranks=np.full(len(whole.ids), size),
    )
    replicas = [rows for rows in of_teams.replicas for _ in range(size)]
    schedules = [schedule for schedule in of_teams.schedules for _ in range(size)]
    if rest is None:
        return shared, replace(of_teams, replicas=replicas, schedules=schedules)
    entries = len(whole.ids)
    rows = len(of_teams.members)
    costs = _both_costs(of_teams.costs, planned.costs)
    own = [(numbers + rows, schedule) for numbers, schedule in zip(planned.replicas, planned.schedules, strict=True)]
    if others < settings.data_parallel:
        replicas += [numbers for numbers, _ in own]
        schedules += [schedule for _, schedule in own]
    else:
        pairs = zip_longest(zip(replicas, schedules, strict=True), own)
        both = [_one_after_another(costs, [each for each in pair if each is not None]) for pair in pairs]
        replicas = [numbers for numbers, _ in both]
        schedules = [schedule for _, schedule in both]
    return _both(shared, rest), ScheduledBatch(
        members=[*of_teams.members, *(members + entries for members in planned.members)],
        batch_layouts=[*of_teams.batch_layouts, *planned.batch_layouts],
        shapes=[*of_teams.shapes, *planned.shapes],
        modes=np.concatenate([of_teams.modes, planned.modes]),
        costs=costs,
        replicas=replicas,
        schedules=schedules,
    )


def _one_after_another(costs: ScheduleProblem, parts: Sequence[tuple[IntArray, Schedule]]) -> tuple[IntArray, Schedule]:
    """A replica's micro-batches, with all passes of the first part before any of the second one."""
    if len(parts) == 1:
        return parts[0]
    (rows, first), (more, then) = parts
    later = [[_moved(its, len(rows)) for its in passes] for passes in then.order]
    order = tuple((*before, *after) for before, after in zip(first.order, later, strict=True))
    both = np.concatenate([rows, more])
    return both, predict(costs.take(both), order)


def _moved(its: Pass, rows: int) -> Pass:
    return msgspec.structs.replace(its, micro_batch=its.micro_batch + rows)


def _at(samples: Samples, places: IntArray) -> Samples:
    """Some of the samples."""
    arrays = {field.name: getattr(samples, field.name) for field in fields(samples)}
    taken: dict[str, Any] = {name: None if array is None else array[places] for name, array in arrays.items()}
    return Samples(**taken)


def _both(shared: Samples, rest: Samples) -> Samples:
    """Shares and what other micro-batches hold."""
    joined: dict[str, Any] = {}
    for field in fields(shared):
        parts = [getattr(one, field.name) for one in (shared, rest)]
        if any(part is not None for part in parts):
            absent = int(field.name == "ranks")
            filled = [
                np.full(len(one.ids), absent) if part is None else part
                for one, part in zip((shared, rest), parts, strict=True)
            ]
            joined[field.name] = np.concatenate(filled)
    return Samples(**joined)


def _both_costs(first: ScheduleProblem, second: ScheduleProblem) -> ScheduleProblem:
    """Of the micro-batches of both; receives start as early as either's orders need."""
    ahead = (first.transfers, second.transfers)
    earliest = max(ahead, key=lambda rules: float("inf") if rules.receive_ahead is None else rules.receive_ahead)
    arrays: dict[str, Any] = {
        field.name: np.concatenate([value, getattr(second, field.name)])
        for field in fields(first)
        if isinstance(value := getattr(first, field.name), np.ndarray) and field.name != "model_state_bytes"
    }
    return replace(first, **arrays, transfers=earliest)
