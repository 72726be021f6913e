"""Long samples on teams of replicas, each its share of every sample; the other samples on the other replicas.

    samples, longest first    900 700 | 300 200 180 150 90 40 …        two of four replicas as a team
    replicas 0 and 1          shares of 900, 700
    replicas 2 and 3          300, 200, … as without teams: whole or in pieces, padded or packed

A team is planned as one replica whose samples cost what shares do (`costing.shares`), in packed rows; the others are
planned as a batch of their own, by the other ways. How many teams there are, of what size, and which samples they run,
is chosen by the work of samples alone, so that both parts end together; searches start from the best two choices.
Without a long sample, or a choice that promises `LEAST_GAIN`, nothing is started.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from megatron_dynapipe.core.batch import Samples, round_up_all
from megatron_dynapipe.core.errors import PlanningError
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
"""Choices of teams that searches start from."""
Choice = tuple[int, int, int]
"""(size, teams, samples): so many teams of that size run the samples of most work."""


class Teams:
    """Other ways, and these ways for the samples that teams leave."""

    def __init__(self, settings: PlannerSettings, ways: Sequence[Way]) -> None:
        self._settings = settings
        self._ways = ways

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """The other ways' for all samples; and, where that promises to be faster, theirs next to teams."""
        proposed = list(self._proposed(samples, problem))
        if not can_cut(problem):
            notice("no teams of replicas: the cost model does not say how wide keys are")
        if problem.forward_only or not can_cut(problem):
            return proposed
        replicas = self._settings.data_parallel
        alone = _stage_times(problem)
        by_sample = alone.sum(axis=1)
        if by_sample.min() > 0 and by_sample.max() * replicas < LONG * by_sample.sum():
            return proposed
        shared = {ranks: self._shared(samples, problem, ranks) for ranks in team_sizes(self._settings.context_teams)}
        work = {1: alone} | {ranks: _stage_times(one.problem) for ranks, one in shared.items()}
        order = np.lexsort((np.arange(len(alone)), -work[max(work)].sum(axis=1)))
        choices = choices_of(work, order, replicas)
        for size, teams, count in choices[:STARTED]:
            proposed += self._beside(samples, problem, shared[size], (size, teams), order[:count], order[count:])
        return proposed

    def _proposed(self, samples: Samples, problem: BatchProblem) -> chain[Candidate]:
        return chain.from_iterable(way.candidates(samples, problem) for way in self._ways)

    def _shared(self, samples: Samples, problem: BatchProblem, ranks: int) -> Candidate:
        """All samples in shares, on one team."""
        chunk = -(-samples.input_positions // (2 * ranks))
        entries = replace(
            samples,
            input_positions=2 * chunk,
            inputs=round_up_all(2 * chunk),
            # Labels are a sample's last positions, and so the first place's, whose last chunk this is, has most.
            labels=None
            if samples.labels is None
            else np.minimum(samples.labels, chunk) + np.maximum(samples.labels - (2 * ranks - 1) * chunk, 0),
        )
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

    def _beside(
        self,
        samples: Samples,
        problem: BatchProblem,
        shared: Candidate,
        sizes: tuple[int, int],
        long: IntArray,
        others: IntArray,
    ) -> Sequence[Candidate]:
        """Candidates for the samples that teams leave, with these teams next to them; none where teams do not fit."""
        size, teams = sizes
        once_ns = int(latency_ns(size, self._settings.network, tensor_parallel=self._settings.tensor_parallel))
        modes = zip(problem.modes, self._settings.recompute, strict=True)
        of_rows = replace(shared.problem, modes=tuple(with_latency(tables, mode, once_ns) for tables, mode in modes))
        team = _part(replace(shared, problem=of_rows), np.sort(long), min(teams, len(long)))
        started = team.start()
        if started is None:
            return []
        whole = _at(samples, np.sort(long))
        join = partial(_joined, whole, team, size, self._settings)
        if not len(others):
            return [replace(team, spread=lambda planned: join(None, planned))]
        rest = _at(samples, np.sort(others))
        replicas = min(self._settings.data_parallel - size * teams, len(others))
        left = replace(problem_of(problem, rest), replicas=replicas, enough_ns=0)
        return [
            replace(
                candidate,
                is_default=False,
                missed="",
                least_ns=started.makespan_ns,
                spread=partial(join, candidate.samples),
            )
            for candidate in self._proposed(rest, left)
        ]


def choices_of(work: dict[int, IntArray], order: IntArray, replicas: int) -> list[Choice]:
    """Teams by what they promise, the best first; those that promise less than `LEAST_GAIN` are left out.

    A replica takes as long as its stage that has most work, and that of its longest sample, whose pieces run on all
    stages at once. A team's samples have no pieces: the longest one's way through the other stages comes before.

    Args:
        work: by ranks that run a sample together, ns of each sample on every stage: int64[samples, stages]; of 1 for
            whole samples, 0 for those that fit on no replica.
        order: samples, the one of most work first.
        replicas: of the run.
    """
    alone = work[1][order]
    rest = np.vstack([np.cumsum(alone[::-1], axis=0)[::-1], np.zeros_like(alone[:1])]).max(axis=1)
    longest = np.append(alone.max(axis=1), 0)
    fits = np.append(alone.min(axis=1) > 0, True)
    fits = np.logical_and.accumulate(fits[::-1])[::-1]
    without = max(rest[0] / replicas, longest[0]) if fits[0] else np.inf
    found: list[tuple[float, Choice]] = []
    for size, times in work.items():
        for teams in range(1, replicas // size + 1 if size > 1 else 1):
            shares = times[order]
            fill = np.maximum.accumulate(shares.sum(axis=1) - shares.max(axis=1))
            in_teams = np.cumsum(shares, axis=0).max(axis=1) / teams
            in_teams = np.maximum(in_teams, np.maximum.accumulate(shares.max(axis=1))) + fill
            left = replicas - size * teams
            beside = np.maximum(rest[1:] / max(left, 1), longest[1:])
            ends = np.maximum(in_teams, beside)
            shared_fit = np.logical_and.accumulate(shares.min(axis=1) > 0)
            ends[~shared_fit | ~fits[1:] | ((rest[1:] > 0) & (left == 0))] = np.inf
            count = int(ends.argmin())
            if ends[count] < without * (1 - LEAST_GAIN):
                found.append((float(ends[count]), (size, teams, count + 1)))
    return [choice for _, choice in sorted(found)]


def _stage_times(problem: BatchProblem) -> IntArray:
    """ns of each sample on every stage, by itself or in a row of samples like it, under the fastest mode; 0 where it is
    not covered or does not fit."""
    packed = BatchLayout.PACKED if BatchLayout.PACKED in problem.batch_layouts else BatchLayout.PADDED
    room = problem.memory_limit_bytes - problem.model_state_bytes
    times = np.zeros((len(problem.inputs), problem.layout.stages), np.int64)
    for copies in (np.ones_like(problem.inputs), np.maximum(ROW // np.maximum(problem.inputs, 1), 1)):
        rows = [np.full(count, sample) for sample, count in enumerate(copies.tolist())]
        for mode in range(len(problem.modes)):
            costs, covered = problem.costs_of(rows, [packed] * len(rows), np.full(len(rows), mode))
            fits = covered & (costs.bytes_alone <= room).all(axis=1)
            its = costs.stage_times_ns // copies[:, None]
            better = fits & ((times.sum(axis=1) == 0) | (its.sum(axis=1) < times.sum(axis=1)))
            times[better] = its[better]
    return times


def _part(shared: Candidate, places: IntArray, teams: int) -> Candidate:
    """Some of the samples in shares, on so many teams."""
    entries = _at(shared.samples, places)
    extras = shared.problem.piece_costs
    assert extras is not None, "of shares"
    problem = replace(
        problem_of(shared.problem, entries),
        replicas=teams,
        enough_ns=0,
        batch_layouts=(BatchLayout.PACKED,),
        precedents=(),
        piece_costs=np.ascontiguousarray(extras[:, places]),
    )
    longest_first = OrderedPartitions(order=by_length(entries.inputs, entries.targets))
    return replace(shared, samples=entries, problem=problem, partitioned=longest_first)


def _joined(
    whole: Samples,
    team: Candidate,
    size: int,
    settings: PlannerSettings,
    rest: Samples | None,
    planned: ScheduledBatch,
) -> tuple[Samples, ScheduledBatch]:
    """The teams' members first, then the other replicas: what micro-batches hold, and these with their orders.

    Args:
        whole: the teams' samples.
        team: planned as one replica for each team.
        size: of teams.
        settings: of the planner.
        rest: what the other replicas' micro-batches hold; None where there are none.
        planned: the other replicas' schedule, or the teams' where there are none.
    """
    of_teams = planned if rest is None else team.scheduled(settings.schedule)
    if of_teams is None:
        raise PlanningError("a search of a team's micro-batches lost the start that it had")
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
    entries, rows = len(whole.ids), len(of_teams.members)
    return _both(shared, rest), ScheduledBatch(
        members=[*of_teams.members, *(members + entries for members in planned.members)],
        batch_layouts=[*of_teams.batch_layouts, *planned.batch_layouts],
        shapes=[*of_teams.shapes, *planned.shapes],
        modes=np.concatenate([of_teams.modes, planned.modes]),
        costs=_both_costs(of_teams.costs, planned.costs),
        replicas=[*replicas, *(numbers + rows for numbers in planned.replicas)],
        schedules=[*schedules, *planned.schedules],
    )


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
