"""Groups of replicas that run in step: equally many micro-batches in one order, alike in time at each position.

The samples of a batch, in an order in which neighbours are alike, are put in rows of one for each replica of a group.
One replica of each group is planned, with the longest sample of each row, and its plan serves the group:

    order         900 880 | 610 600 | 300 290 | 40    |     rows for a group of two replicas
    planned       900       610       300       40          micro-batches {0}, {1, 2}, {3}
    replica 0     {900} {610, 290} {40}                     as planned, with samples of its own
    replica 1     {880} {600, 300} {}                       the last one is a filler

If the longest sample of a row is cut, all of the row are cut at the same positions; a shorter one may lack the last
pieces.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.orders import predict
from megatron_dynapipe.core.partition import candidate_orders
from megatron_dynapipe.core.problem import BatchProblem, BoolArray, IntArray, ScheduleProblem
from megatron_dynapipe.core.scheduling import ScheduledBatch
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.ways import Candidate, Way
from megatron_dynapipe.ways.pieces import CutCandidate, Pieces, of_pieces, problem_of


class Lockstep:
    """Samples in rows of one for each replica of a group.

    Args:
        rows: int64[rows, replicas], samples of the batch.
        present: bool[rows, replicas], whether there is such a sample: the last row may lack some.
    """

    def __init__(self, rows: IntArray, present: BoolArray) -> None:
        self.rows = rows
        self.present = present

    @classmethod
    def of(cls, samples: Samples, replicas: int) -> Self:
        """Rows of alike samples, each replica with about as many positions as the others."""
        orders = candidate_orders(samples.inputs, samples.targets)
        positions = samples.inputs + samples.targets
        rows = min(
            (_rows(order, replicas) for order in orders), key=lambda rows: int(positions[rows].max(axis=1).sum())
        )
        present = (np.arange(rows.size) < len(positions)).reshape(rows.shape)
        work = np.zeros(replicas, np.int64)
        for row, there in zip(rows, present, strict=True):
            longest_first = np.lexsort((-positions[row], ~there))
            least_first = np.argsort(work, kind="stable")
            row[least_first], there[least_first] = row[longest_first], there[longest_first]
            work += positions[row] * there
        return cls(rows, present)

    def longest(self, samples: Samples) -> Samples:
        """The batch that is planned: a sample for each row, as long as its longest.

        Ids are numbers of rows. Rows that share a sample have one id; none of these may be cut.
        """
        longest = {
            field.name: value[self.rows].max(axis=1)
            for field in fields(samples)
            if isinstance(value := getattr(samples, field.name), np.ndarray)
        }
        ids = np.arange(len(self.rows))
        _, first, counts = np.unique(samples.ids, return_index=True, return_counts=True)
        if (counts > 1).any():
            ids[np.isin(samples.ids[self.rows], samples.ids[first[counts > 1]]).any(axis=1)] = -1
        return Samples(**longest | {"ids": ids})

    def spread(
        self,
        samples: Samples,
        problem: BatchProblem,
        candidate: Candidate,
        settings: PlannerSettings,
        planned: ScheduledBatch,
    ) -> tuple[Samples, ScheduledBatch]:
        """The planned replicas' micro-batches and orders of passes for all of their groups, and what they are made of.

        Args:
            samples: the batch's.
            problem: the problem of planning all of them.
            candidate: the candidate of the longest ones.
            settings: the planner's.
            planned: the candidate's schedule, one replica for each group.
        """
        if not isinstance(candidate, CutCandidate):
            return samples, self._spread(problem, planned)
        pieces, places = self._cut(samples, candidate.pieces)
        cut = of_pieces(samples, problem, pieces, recompute=settings.recompute, element_bytes=settings.element_bytes)
        return cut.samples, places._spread(cut.problem, planned)

    def _cut(self, samples: Samples, longest: Pieces) -> tuple[Pieces, "Lockstep"]:
        """Every sample's part of the pieces of its row's longest one, and these parts in rows."""
        sample = self.rows[longest.sample]
        start = np.repeat(longest.start[:, None], self.rows.shape[1], axis=1)
        length = samples.input_positions[sample]
        there = self.present[longest.sample] & (start < length)
        end = np.minimum(longest.end[:, None], length)
        order = np.lexsort((start[there], sample[there]))  # a sample's pieces one after another
        place = np.zeros_like(sample)
        place[there] = np.argsort(order)
        columns = (column[there][order] for column in (sample, start, end, length))
        return Pieces(*columns), Lockstep(place, there)

    def _spread(self, problem: BatchProblem, planned: ScheduledBatch) -> ScheduledBatch:
        count, group = len(planned.members), self.rows.shape[1]
        every = [
            self.rows[members, replica][self.present[members, replica]]
            for replica in range(group)
            for members in planned.members
        ]
        batch_layouts = planned.batch_layouts * group
        modes = np.tile(planned.modes, (group, 1))
        costs, _ = problem.costs_of(every, batch_layouts, modes)
        copies = np.arange(count * group).reshape(group, count)
        replicas = []
        schedules = []
        for order, passes in zip(planned.replicas, planned.schedules, strict=True):
            positions = copies[:, order]
            replicas += list(positions)
            schedules += [predict(_slowest(costs, positions), passes.order)] * group
        return ScheduledBatch(
            members=every,
            batch_layouts=batch_layouts,
            shapes=[problem.shape(*one) for one in zip(every, batch_layouts, strict=True)],
            modes=modes,
            costs=costs,
            replicas=replicas,
            schedules=schedules,
        )


class InStep:
    """Other ways, for one replica of each group of neighbours that run in step."""

    def __init__(self, settings: PlannerSettings, ways: Sequence[Way]) -> None:
        self._settings = settings
        self._ways = ways

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """The other ways' micro-batches for the longest samples of each group, which are spread over its replicas."""
        together = Lockstep.of(samples, self._settings.replicas_in_step)
        longest = together.longest(samples)
        proposed = [way.candidates(longest, problem_of(problem, longest)) for way in self._ways]
        return [
            replace(candidate, spread=partial(together.spread, samples, problem, candidate, self._settings))
            for candidate in chain.from_iterable(proposed)
        ]


def _rows(order: IntArray, replicas: int) -> IntArray:
    """The order in rows; the last one is filled up with its last sample."""
    missing = -len(order) % replicas
    return np.append(order, np.repeat(order[-1:], missing)).reshape(-1, replicas)


def _slowest(costs: ScheduleProblem, positions: IntArray) -> ScheduleProblem:
    """The most time and memory of the replicas' micro-batches, at every position on each stage."""
    most: dict[str, Any] = {
        field.name: np.ascontiguousarray(value[positions].max(axis=0))
        for field in fields(costs)
        if isinstance(value := getattr(costs, field.name), np.ndarray) and field.name != "model_state_bytes"
    }
    return replace(costs, **most)
