"""Rows of samples as other trainers pack them today, by their own rules, to compare with.

verl         verl-project/verl (`rearrange_micro_batches` in verl/utils/seqlen_balancing.py, 1dda039b): samples are
             divided by work over replicas, then over as many micro-batches as hold a replica's tokens; light
             micro-batches at both ends
slime        THUDM/slime (`build_dp_schedule` in slime/utils/dp_schedule.py, 624b824a) with `balance_by_flops`:
             divided by FLOPs, the largest micro-batches split to a multiple of the replicas

A sample's length is its input and target positions together. Each function returns indices of the samples of every
micro-batch; micro-batch i runs on replica i mod replicas. None if there are fewer samples than micro-batches needed.
`tests/upstream/test_packing.py` compares them with these files. Rules that these two beat, or that train on no replica
alone, are in `benchmarks/planning`.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

Rows = list[list[int]]

_VERL_LINEAR = 24576
"""Work of a position outside of attention in verl, in squared positions: for a model of hidden size 4,096."""


class Room(NamedTuple):
    """The rows and memory that a rival packs into.

    Attributes:
        positions: most of a row.
        replicas: data-parallel replicas.
        group: micro-batches come in multiples of this on each replica: the stages with virtual ones, else 1.
        hidden_size: the model's, for the rules that count FLOPs.
    """

    positions: int
    replicas: int
    group: int
    hidden_size: int


def verl(lengths: Sequence[int], room: Room) -> Rows:
    """Samples by work over replicas, each replica's over equally many micro-batches, the light ones first and last."""
    work = [_VERL_LINEAR * length + length**2 for length in lengths]
    equal = len(lengths) % room.replicas == 0
    replicas = differencing(work, room.replicas, equal_counts=equal)
    count = 0
    for members in replicas:
        positions = sum(lengths[sample] for sample in members)
        count = max(count, min(len(members), -(-positions // room.positions)))
    count = min(-(-count // room.group) * room.group, min(map(len, replicas)))
    columns = []
    for members in replicas:
        parts = differencing([work[sample] for sample in members], count)
        parts.sort(key=lambda part: (-sum(work[members[place]] for place in part), -part[0]))
        light_at_both_ends = [*parts[::2][::-1], *parts[1::2]]
        columns.append([[members[place] for place in part] for part in light_at_both_ends])
    return [row for rows_in_turn in zip(*columns, strict=True) for row in rows_in_turn]


def slime(lengths: Sequence[int], room: Room) -> Rows:
    """Micro-batches equal in FLOPs, as few as hold all tokens; then the longest are split to a multiple of replicas.

    Micro-batches are divided by FLOPs over the replicas, as many to each (`balance_data`).
    """
    hidden = room.hidden_size
    count = -(-sum(lengths) // room.positions)
    work = [16 * hidden * length + length**2 for length in lengths]  # FLOPs / (2 · hidden), FFN 4 · hidden, no head
    if count < len(lengths):
        rows = differencing(work, count)
    else:
        rows = [[sample] for sample in range(len(lengths))]
    multiple = room.replicas * room.group

    def extent(row: int) -> tuple[bool, int, int]:
        return len(rows[row]) > 1, sum(lengths[sample] for sample in rows[row]), row

    while len(rows) % multiple:
        longest = max(range(len(rows)), key=extent)
        if len(rows[longest]) == 1:
            return []
        rows[longest], added = _halves(rows[longest], lengths)
        rows.append(added)
    work_of_rows = [sum(work[sample] for sample in row) for row in rows]
    replicas = differencing(work_of_rows, room.replicas, equal_counts=True)
    return [rows[index] for indices in zip(*replicas, strict=True) for index in indices]


def _halves(row: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """A row's samples in two, the longest first, each to the shorter of both."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for sample in sorted(row, key=lambda sample: -lengths[sample]):
        half = int(sums[1] < sums[0])
        halves[half].append(sample)
        sums[half] += lengths[sample]
    return halves


Rule = Callable[[Sequence[int], Room], Rows]
"""Samples' lengths and the room for them → rows; none where the rule does not serve these replicas."""
RIVALS: dict[str, Rule] = {"verl": verl, "slime": slime}
"""Rules by the names under which `compare` knows them."""


def row_sizes(lengths: Sequence[int], longest: int, parts: int) -> Iterator[int]:
    """Most positions of a row, to choose from: an eighth of the longest sample apart, later a sixteenth of themselves.

    Args:
        lengths: the samples' lengths, which the last size holds together.
        longest: positions of the longest sample.
        parts: the first size is such a part of it.
    """
    size = -(-longest // parts)
    step = -(-longest // max(parts, 8))
    yield size
    while size < sum(lengths):
        size += max(step, size // 16)
        yield size


def differencing(work: Sequence[int], parts: int, *, equal_counts: bool = False) -> Rows:
    """Divide items into parts of alike sums by the largest differencing method of Karmarkar and Karp (1982).

    Args:
        work: each item's.
        parts: at least 1, at most as many as there are items.
        equal_counts: every part has as many items; `parts` divides their number.

    Returns:
        Indices of each part's items, ascending.
    """
    return [[*items] for items in _differenced(tuple(work), parts, equal_counts)]


@lru_cache(maxsize=4096)
def _differenced(work: tuple[int, ...], parts: int, equal_counts: bool) -> tuple[tuple[int, ...], ...]:
    """`differencing`, remembered, since neighbouring sizes of rows ask the same."""
    ascending = sorted(range(len(work)), key=lambda item: (work[item], item))
    step = parts if equal_counts else 1
    heap = []
    for first in range(0, len(ascending), step):
        sums = [(work[item], 1, [item]) for item in ascending[first : first + step]]
        heap.append(_entry(sums + [(0, 0, [])] * (parts - len(sums))))
    heapq.heapify(heap)
    while len(heap) > 1:
        one = heapq.heappop(heap)[-1]
        other = heapq.heappop(heap)[-1]
        joined = [
            (a + b, n + m, ours + theirs) for (a, n, ours), (b, m, theirs) in zip(one, reversed(other), strict=True)
        ]
        heapq.heappush(heap, _entry(joined))
    return tuple(tuple(sorted(items)) for *_, items in heap[0][-1])


_Sums = list[tuple[int, int, list[int]]]
"""Each part: work, number of items, items as they came to it."""


def _entry(sums: _Sums) -> tuple[int, int, int, list[int], _Sums]:
    """A heap's entry: the largest spread first, of equal ones that of the largest part, by work, number, last items."""
    descending = sorted(sums, reverse=True)
    work, count, items = descending[0]
    return descending[-1][0] - work, -work, -count, [-item for item in items], descending
