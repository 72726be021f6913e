"""The items of a sequence, such as layers, over parts that are as even as can be, or over ranks that are."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from megatron_dynapipe.core.errors import InfeasibleError

TILTS = (1 / 3, 2 / 3)
"""By what part the first rank's first chunk has less than the mean, and its last chunk more."""

type _Reached = tuple[tuple[int, int], tuple[int, ...]]


def evenest(work: Sequence[int], parts: int, *, fits: Sequence[Sequence[bool]] | None = None) -> tuple[int, ...]:
    """How many of the items each part has, at least one, where the busiest part has the least work.

    A dynamic program over items × parts; of equally busy ones that of the least sum of squares so far goes on.

    Args:
        work: of the items.
        parts: how many.
        fits: `[first][end]`: whether the items from `first` up to `end` may be one part.

    Raises:
        InfeasibleError: no division fits.
    """
    ends = [0, *accumulate(work)]
    count = len(work)
    # least[n]: (busiest part, sum of squares) of the first n items in the parts so far; the squares even out others.
    least: dict[int, _Reached] = {0: ((0, 0), ())}
    for part in range(1, parts + 1):
        following: dict[int, _Reached] = {}
        for n in range(part, count - parts + part + 1):
            options = []
            for m, ((busiest, squares), sizes) in least.items():
                if m < n and (fits is None or fits[m][n]):
                    added = ends[n] - ends[m]
                    options.append(((max(busiest, added), squares + added**2), (*sizes, n - m)))
            if options:
                following[n] = min(options)
        least = following
    if count not in least:
        raise InfeasibleError(
            f"no division of {count} segments into {parts} stages fits the memory",
            hint="use more stages, or smaller batches",
        )
    return least[count][1]


def tilted(work: Sequence[int], stages: int, chunks: int) -> list[tuple[int, ...]]:
    """How many items each chunk of each rank has, in order, where all ranks have as much work.

    The first chunks of the first ranks have less, up to each of `TILTS` on rank 0, so that every rank has work soon:

        rank 0   ▒ │ ▒▒▒▒▒
        rank 1   ▒▒ │ ▒▒▒▒
        rank 2   ▒▒▒ │ ▒▒▒

    Args:
        work: of the items.
        stages: ranks, two or more.
        chunks: of each rank, two or more.
    """
    done = [0, *accumulate(work)]
    found = []
    for tilt in TILTS:
        by_rank = tilt * (1 - np.arange(stages) / (stages - 1))
        shares = 1 + np.outer(np.linspace(-1, 1, chunks), by_rank)
        reached = np.cumsum(shares)[:-1] * (done[-1] / shares.sum())
        ends = np.rint(np.interp(reached, done, np.arange(len(done)))).astype(int).tolist()
        split = tuple(end - first for first, end in pairwise([0, *ends, len(work)]))
        if min(split) > 0:
            found.append(split)
    return found
