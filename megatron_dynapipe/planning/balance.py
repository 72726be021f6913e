"""Dealing micro-batches to data-parallel replicas so that the slowest replica's pipeline is as fast as can be."""

import numpy as np

from megatron_dynapipe.planning.problem import IntArray


def deal(times: IntArray, replicas: int) -> list[IntArray]:
    """Micro-batch indices of each replica, ascending.

    Longest first, each to the replica on which the slowest rank would end earliest; then single micro-batches and
    pairs are moved while that shortens the slowest replica.

    Args:
        times: int64[micro-batches, ranks], forward and backward together.
        replicas: number of replicas, at most the number of micro-batches.
    """
    total = times.sum(axis=1)
    fill = total - times.max(axis=1)
    owner = np.zeros(len(times), np.int64)
    work = np.zeros((replicas, times.shape[1]), np.int64)
    longest = np.zeros(replicas, np.int64)
    count = np.zeros(replicas, np.int64)
    for m in np.lexsort((np.arange(len(times)), -total)):
        ends = (work + times[m]).max(axis=1) + np.maximum(longest, fill[m])
        r = int(np.lexsort((np.arange(replicas), count, ends))[0])
        owner[m] = r
        work[r] += times[m]
        longest[r] = max(longest[r], fill[m])
        count[r] += 1
    return [np.flatnonzero(owner == r) for r in range(replicas)]
