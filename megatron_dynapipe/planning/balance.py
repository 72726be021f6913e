"""Micro-batches over data-parallel replicas, so that the slowest replica's pipeline is as fast as can be.

A replica's pipeline takes about as long as its busiest stage works, and before and after that the longest warm-up and
drain of any of its micro-batches: the sum of the micro-batches' times alone says neither.
"""

import numpy as np

from megatron_dynapipe.planning.problem import IntArray

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
    longest, count = np.zeros(replicas, np.int64), np.zeros(replicas, np.int64)
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
    my_work, their_work = (rows.sum(axis=0) + exchanged).max(axis=2), (theirs.sum(axis=0) - exchanged).max(axis=2)
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
