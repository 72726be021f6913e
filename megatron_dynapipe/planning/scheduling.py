"""From partitions to scheduled micro-batches: which replica runs each, and in which order of passes.

adaptive over dp     partitions ── search: assignment, order and policy together ──► ScheduledBatch
otherwise            each partition ── assign to replicas ── schedule each replica ──► the fastest ScheduledBatch
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_dynapipe.errors import InfeasibleError, StallError
from megatron_dynapipe.planning.balance import assign
from megatron_dynapipe.planning.partition import OrderedPartitions, Partition
from megatron_dynapipe.planning.problem import BatchProblem, IntArray, ScheduleProblem
from megatron_dynapipe.planning.schedules import Schedule, ScheduleSettings, predict, schedule
from megatron_dynapipe.planning.schedules.one_f_one_b import one_f_one_b_within_memory
from megatron_dynapipe.planning.search import search
from megatron_dynapipe.units import BatchLayout, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """All micro-batches of a batch, assigned to replicas and scheduled.

    Attributes:
        members: samples of each micro-batch.
        layouts: of each.
        shapes: of each.
        modes: int64[micro-batches, virtual stages], index of its recompute mode on each.
        costs: its costs on every virtual stage.
        replicas: micro-batches of each replica, in the order in which they enter its pipeline.
        schedules: of each replica.
    """

    members: list[IntArray]
    layouts: list[BatchLayout]
    shapes: list[Shape]
    modes: IntArray
    costs: ScheduleProblem
    replicas: list[IntArray]
    schedules: list[Schedule]

    @property
    def makespan_ns(self) -> int:
        """Predicted time of the slowest replica."""
        return max(schedule.makespan_ns for schedule in self.schedules)


def schedule_batch(
    problem: BatchProblem, partitioned: OrderedPartitions, chosen: ScheduleSettings, *, searchable: bool
) -> ScheduledBatch | None:
    """The fastest schedule found that fits the memory, or None.

    Args:
        problem: samples, costs, memory, replicas.
        partitioned: the partitions to choose from.
        chosen: how passes are ordered.
        searchable: whether a search may change the partition.

    Raises:
        PlanningError: costs or settings outside what 64-bit sums can hold.
        StallError: every order stalls by the problem's rules of transfers.
    """
    candidates = []
    may_reorder = searchable and chosen.method != "adaptive"
    if may_reorder and BatchLayout.PACKED in problem.layouts:
        return _rescheduled(problem, partitioned, chosen)
    if searchable and chosen.method == "adaptive":
        searched = _searched(problem, partitioned, chosen)
        if searched is not None:
            if problem.split_backward == "on":
                return searched
            candidates.append(searched)
            # A search of padded micro-batches begins with 1F1B, of which list scheduling may refuse what has memory.
            chosen = replace(chosen, method="1f1b")
    stalled: StallError | None = None
    for partition in partitioned.partitions:
        try:
            candidates.append(_scheduled(problem, partitioned.order, partition, chosen))
        except InfeasibleError:
            continue
        except StallError as error:
            stalled = error
    if stalled is not None and not candidates:
        raise stalled
    if not candidates and may_reorder:  # partitions leave messages too little room; a search does not
        return _rescheduled(problem, partitioned, chosen)
    return min(candidates, key=lambda scheduled: scheduled.makespan_ns, default=None)


def _searched(problem: BatchProblem, partitioned: OrderedPartitions, chosen: ScheduleSettings) -> ScheduledBatch | None:
    """The best solution of the search, or None where it finds none within the memory."""
    solution = search(problem, partitioned, evaluations=chosen.search_evaluations, seed=chosen.seed)
    if not solution:
        return None
    members = [micro_batch for replica in solution for micro_batch in replica.members]
    layouts = [layout for replica in solution for layout in replica.layouts]
    shapes = [problem.shape(*micro_batch) for micro_batch in zip(members, layouts, strict=True)]
    modes = np.concatenate([replica.modes for replica in solution])
    costs, _ = problem.costs_of(members, layouts, modes)
    replicas = np.split(np.arange(len(members)), np.cumsum([len(replica.members) for replica in solution])[:-1])
    may_be_plain = problem.chains is None and problem.split_backward != "on"
    schedules = [
        predict(one, replica.order, *([one_f_one_b_within_memory(one)] if may_be_plain else []))
        for one, replica in zip(map(costs.take, replicas), solution, strict=True)
    ]
    return ScheduledBatch(
        members=members,
        layouts=layouts,
        shapes=shapes,
        modes=modes,
        costs=costs,
        replicas=replicas,
        schedules=schedules,
    )


def _rescheduled(
    problem: BatchProblem, partitioned: OrderedPartitions, chosen: ScheduleSettings
) -> ScheduledBatch | None:
    """The search's micro-batches, their passes ordered by another method; None where that does not fit the memory."""
    searched = _searched(problem, partitioned, chosen)
    if searched is None:
        return None
    try:
        schedules = [schedule(searched.costs.take(rows), chosen) for rows in searched.replicas]
    except InfeasibleError:
        return None
    return replace(searched, schedules=schedules)


def _scheduled(
    problem: BatchProblem, order: IntArray, partition: Partition, chosen: ScheduleSettings
) -> ScheduledBatch:
    """One partition as it is.

    Raises:
        InfeasibleError: its schedule does not fit the memory, or a half of a micro-batch was never measured.
    """
    members, modes = partition.members(order), partition.modes
    while len(members) < problem.replicas:  # Every replica gets one: halve the largest.
        largest = int(np.argmax([len(micro_batch) for micro_batch in members]))
        half = len(members[largest]) // 2
        members[largest : largest + 1] = [members[largest][:half], members[largest][half:]]
        modes = np.insert(modes, largest, modes[largest])
    layouts = [partition.layout] * len(members)
    shapes = [problem.shape(micro_batch, partition.layout) for micro_batch in members]
    costs, covered = problem.costs_of(members, layouts, modes)
    if not covered.all():  # A size that was measured says nothing of its half.
        raise InfeasibleError("a micro-batch that every replica needs a part of cannot be divided")
    if partition.in_turn:
        replicas = [np.arange(first, len(members), problem.replicas) for first in range(problem.replicas)]
    else:
        replicas = assign(costs.stage_times_ns, problem.replicas)
    schedules = [schedule(costs.take(rows), chosen) for rows in replicas]
    return ScheduledBatch(
        members=members,
        layouts=layouts,
        shapes=shapes,
        modes=np.repeat(modes[:, None], problem.layout.virtual_stages, axis=1),
        costs=costs,
        replicas=replicas,
        schedules=schedules,
    )
