"""From partitions to scheduled micro-batches: which replica runs each, and in which order of passes.

adaptive over dp     partitions ── search: assignment, order and policy together ──► ScheduledBatch
otherwise            each partition ── assign to replicas ── schedule each replica ──► the fastest ScheduledBatch
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_dynapipe.core.errors import InfeasibleError, StallError
from megatron_dynapipe.core.orders import Schedule, ScheduleSettings, one_f_one_b_within_memory, predict, schedule
from megatron_dynapipe.core.partition import OrderedPartitions, Partition
from megatron_dynapipe.core.problem import BatchProblem, IntArray, ScheduleProblem
from megatron_dynapipe.core.search import search
from megatron_dynapipe.core.units import BatchLayout, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """All micro-batches of a batch, assigned to replicas and scheduled.

    Attributes:
        members: samples of each micro-batch.
        batch_layouts: each micro-batch's layout.
        shapes: each micro-batch's shape.
        modes: int64[micro-batches, virtual stages], index of its recompute mode on each.
        costs: its costs on every virtual stage.
        replicas: micro-batches of each replica, in the order in which they enter its pipeline.
        schedules: each replica's schedule.
    """

    members: list[IntArray]
    batch_layouts: list[BatchLayout]
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
    if may_reorder and BatchLayout.PACKED in problem.batch_layouts:
        return _rescheduled(problem, partitioned, chosen)
    if searchable and chosen.method == "adaptive" and (found := searched(problem, partitioned, chosen)) is not None:
        if problem.split_backward == "on":
            return found
        candidates.append(found)
        # A search of padded micro-batches begins with 1F1B: list scheduling may refuse one that has memory.
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


def searched(
    problem: BatchProblem, partitioned: OrderedPartitions, chosen: ScheduleSettings, *, following: bool = False
) -> ScheduledBatch | None:
    """The best solution of the search, or None where it finds none within the memory; as `search.search`."""
    evaluations, seed = chosen.search_evaluations, chosen.seed
    solution = search(problem, partitioned, evaluations=evaluations, seed=seed, following=following)
    if not solution:
        return None
    members = [micro_batch for replica in solution for micro_batch in replica.members]
    batch_layouts = [layout for replica in solution for layout in replica.batch_layouts]
    shapes = [problem.shape(*micro_batch) for micro_batch in zip(members, batch_layouts, strict=True)]
    modes = np.concatenate([replica.modes for replica in solution])
    costs, _ = problem.costs_of(members, batch_layouts, modes)
    ends = np.cumsum([len(replica.members) for replica in solution])
    replicas = np.split(np.arange(len(members)), ends[:-1])
    may_be_plain = problem.chains is None and problem.split_backward != "on"
    schedules = [
        predict(one, replica.order, *([one_f_one_b_within_memory(one)] if may_be_plain else []))
        for one, replica in zip(map(costs.take, replicas), solution, strict=True)
    ]
    return ScheduledBatch(
        members=members,
        batch_layouts=batch_layouts,
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
    if (found := searched(problem, partitioned, chosen)) is None:
        return None
    try:
        schedules = [schedule(found.costs.take(rows), chosen) for rows in found.replicas]
    except InfeasibleError:
        return None
    return replace(found, schedules=schedules)


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
    batch_layouts = [partition.layout] * len(members)
    shapes = [problem.shape(micro_batch, partition.layout) for micro_batch in members]
    costs, covered = problem.costs_of(members, batch_layouts, modes)
    if not covered.all():  # A size that was measured says nothing of its half.
        raise InfeasibleError("a micro-batch that every replica needs a part of cannot be divided")
    if partition.in_turn:
        replicas = [np.arange(first, len(members), problem.replicas) for first in range(problem.replicas)]
    else:
        replicas = assign(costs.stage_times_ns, problem.replicas)
    schedules = [schedule(costs.take(rows), chosen) for rows in replicas]
    return ScheduledBatch(
        members=members,
        batch_layouts=batch_layouts,
        shapes=shapes,
        modes=np.repeat(modes[:, None], problem.layout.virtual_stages, axis=1),
        costs=costs,
        replicas=replicas,
        schedules=schedules,
    )


EXCHANGES = 32
"""Most moves and exchanges that improve the first assignment."""


def assign(times: IntArray, replicas: int) -> list[IntArray]:
    """Micro-batch indices of each replica, ascending; every replica gets one where there are enough.

    The longest first, each to the replica that would end earliest; then micro-batches of the slowest replica are moved
    or exchanged while that makes it and its partner faster than it was.

    Args:
        times: int64[micro-batches, stages], forward and backward together.
        replicas: number of replicas, at least 1.
    """
    owner = _greedy(times, replicas)
    for _ in range(EXCHANGES if replicas > 1 else 0):
        if not _improve(times, owner, replicas):
            break
    return [np.flatnonzero(owner == replica) for replica in range(replicas)]


def pipeline_time(times: IntArray) -> int:
    """Predicted time of one replica's micro-batches: int64 `[micro-batches, stages]` → ns."""
    if not len(times):
        return 0
    return int(times.sum(axis=0).max() + (times.sum(axis=1) - times.max(axis=1)).max())


def _greedy(times: IntArray, replicas: int) -> IntArray:
    total = times.sum(axis=1)
    warmup = total - times.max(axis=1)
    owner = np.zeros(len(times), np.int64)
    work = np.zeros((replicas, times.shape[1]), np.int64)
    longest = np.zeros(replicas, np.int64)
    count = np.zeros(replicas, np.int64)
    for index in np.lexsort((np.arange(len(times)), -total)):
        ends = (work + times[index]).max(axis=1) + np.maximum(longest, warmup[index])
        replica = int(np.lexsort((np.arange(replicas), ends, count > 0))[0])  # replicas without any first
        owner[index] = replica
        work[replica] += times[index]
        longest[replica] = max(longest[replica], warmup[index])
        count[replica] += 1
    return owner


def _improve(times: IntArray, owner: IntArray, replicas: int) -> bool:
    """Move or exchange one micro-batch of the slowest replica, in `owner`; False where neither helps."""
    ends = [pipeline_time(times[owner == replica]) for replica in range(replicas)]
    slowest = ends.index(max(ends))
    rows = np.flatnonzero(owner == slowest)
    for partner in sorted(range(replicas), key=lambda replica: ends[replica]):
        theirs = np.flatnonzero(owner == partner)
        if partner == slowest or len(rows) < 2:
            continue
        after = _after_exchange(times[rows], times[theirs])
        leaving, coming = np.unravel_index(int(after.argmin()), after.shape)
        if after[leaving, coming] >= ends[slowest]:
            continue
        owner[rows[leaving]] = partner
        if coming > 0:
            owner[theirs[coming - 1]] = slowest
        return True
    return False


def _after_exchange(rows: IntArray, theirs: IntArray) -> IntArray:
    """The later end of two replicas once the first gives i and takes j - 1 (nothing where j is 0): `[i, j]`."""
    theirs = np.concatenate([np.zeros((1, theirs.shape[1]), np.int64), theirs])
    exchanged = theirs[None] - rows[:, None]
    my_work = (rows.sum(axis=0) + exchanged).max(axis=2)
    their_work = (theirs.sum(axis=0) - exchanged).max(axis=2)
    my_warmup, their_warmup = (times.sum(axis=1) - times.max(axis=1) for times in (rows, theirs))
    my_end = my_work + np.maximum(_largest_of_others(my_warmup)[:, None], their_warmup)
    their_end = their_work + np.maximum(my_warmup[:, None], _largest_of_others(their_warmup))
    return np.asarray(np.maximum(my_end, their_end))


def _largest_of_others(values: IntArray) -> IntArray:
    """For each value, the largest of the others; 0 where there is none."""
    order = np.argsort(values, kind="stable")
    largest = np.full_like(values, values[order[-1]])
    largest[order[-1]] = values[order[-2]] if len(values) > 1 else 0
    return largest
