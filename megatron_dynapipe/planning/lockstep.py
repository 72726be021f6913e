"""Replicas that run in step: equally many micro-batches, those of one position alike in time, in one order of passes.

The samples of a batch, in an order in which neighbours are alike, are put in rows of one for each replica. One
replica is planned, with the longest sample of each row, and its plan serves all of them:

    order         900 880 | 610 600 | 300 290 | 40 30 |     rows for two replicas
    planned       900       610       300       40          micro-batches {0}, {1, 2, 3}
    replica 0     {900} {610, 290, 40}                      as planned, with samples of its own
    replica 1     {880} {600, 300, 30}
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.partition import candidate_orders
from megatron_dynapipe.planning.problem import BatchProblem, BoolArray, IntArray, ScheduleProblem
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.planning.schedules import predict
from megatron_dynapipe.planning.scheduling import ScheduledBatch


@dataclass(frozen=True, slots=True, eq=False)
class Lockstep:
    """Samples in rows of one for each replica, int64[rows, replicas]; the last row may lack some (`present`)."""

    rows: IntArray
    present: BoolArray

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
        """What is planned: a sample for each row, as long as its longest; ids are numbers of rows."""
        longest = {
            field.name: value[self.rows].max(axis=1)
            for field in fields(samples)
            if isinstance(value := getattr(samples, field.name), np.ndarray)
        }
        return Samples(**longest | {"ids": np.arange(len(self.rows))})

    def spread(self, problem: BatchProblem, planned: ScheduledBatch) -> ScheduledBatch:
        """The planned replica's micro-batches and order of passes for all of them.

        Args:
            problem: of all samples.
            planned: of the longest ones, one replica.

        Raises:
            PlanningError: a replica has no sample for a micro-batch.
        """
        (order,), (passes,) = planned.replicas, planned.schedules
        count, replicas = len(planned.members), self.rows.shape[1]
        every = [
            self.rows[members, replica][self.present[members, replica]]
            for replica in range(replicas)
            for members in planned.members
        ]
        if not all(map(len, every)):
            raise PlanningError(
                f"{int(self.present.sum())} samples cannot be divided into equally many micro-batches on each of"
                f" {replicas} replicas",
                hint="use a global batch that the replicas divide",
            )
        layouts, modes = planned.layouts * replicas, np.tile(planned.modes, replicas)
        costs, _ = problem.costs_of(every, layouts, modes)
        positions = np.arange(count * replicas).reshape(replicas, count)[:, order]
        return ScheduledBatch(
            members=every,
            layouts=layouts,
            shapes=[problem.shape(*one) for one in zip(every, layouts, strict=True)],
            modes=modes,
            costs=costs,
            replicas=list(positions),
            schedules=[predict(_slowest(costs, positions), passes.order)] * replicas,
        )


def _rows(order: IntArray, replicas: int) -> IntArray:
    """The order in rows; the last one is filled up with its last sample."""
    missing = -len(order) % replicas
    return np.append(order, np.repeat(order[-1:], missing)).reshape(-1, replicas)


def _slowest(costs: ScheduleProblem, positions: IntArray) -> ScheduleProblem:
    """Of every position, on each stage, the most time and memory of the replicas' micro-batches."""
    most: dict[str, Any] = {
        field.name: np.ascontiguousarray(value[positions].max(axis=0))
        for field in fields(costs)
        if isinstance(value := getattr(costs, field.name), np.ndarray) and field.name != "model_state_bytes"
    }
    return replace(costs, **most)
