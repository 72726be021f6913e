"""Segments of a packed row in groups of like lengths, for attention without a kernel for packed rows.

    row       a a a a b b c c c d              groups    a a a a     b b
    places    0 1 2 3 4 5 6 7 8 9                        c c c ·     d ·

One call of attention per segment costs more in launches than in work; one call for all pads too much. Groups pad as
long as that costs less than another call. Only attention is padded so: everything else runs on the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CALL_SCORES = 4096
"""Scores of a head that take as long as one more call, forward and backward, on a CPU with hidden sizes of 128–1024."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentGroup:
    """Segments that attend in one call.

    Attributes:
        count: segments.
        queries, keys: positions of the longest.
        query_places: int64[count × queries], where each is in the row of queries; any place for padding.
        key_places: int64[count × keys], likewise.
        real_keys: bool[count, 1, 1, keys], False for padding; None where no segment is padded.
    """

    count: int
    queries: int
    keys: int
    query_places: Tensor
    key_places: Tensor
    real_keys: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentGroups:
    """All groups of a row.

    Attributes:
        groups: of all segments that have queries.
        back: int64[t], where each of the row's queries is among the groups' queries, one group after another.
    """

    groups: Sequence[SegmentGroup]
    back: Tensor


def group_segments(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> SegmentGroups:
    """Group the segments of a row.

    Args:
        queries: positions of every segment in the row of queries.
        keys: in the row of keys.
        device: where the tensors go.
    """
    query_starts, key_starts = _starts(queries), _starts(keys)
    groups, back, placed = [], torch.zeros(sum(queries), dtype=torch.int64), 0
    for segments in like_segments(queries, keys):
        longest = max(queries[s] for s in segments), max(keys[s] for s in segments)
        for number, segment in enumerate(segments):
            first = placed + number * longest[0]
            start = query_starts[segment]
            back[start : start + queries[segment]] = torch.arange(first, first + queries[segment])
        placed += len(segments) * longest[0]
        query_places, _ = _places([query_starts[s] for s in segments], [queries[s] for s in segments], longest[0])
        key_places, real = _places([key_starts[s] for s in segments], [keys[s] for s in segments], longest[1])
        groups.append(
            SegmentGroup(
                count=len(segments),
                queries=longest[0],
                keys=longest[1],
                query_places=query_places.to(device),
                key_places=key_places.to(device),
                real_keys=None if bool(real.all()) else real[:, None, None].to(device),
            )
        )
    return SegmentGroups(groups=groups, back=back.to(device))


def like_segments(queries: Sequence[int], keys: Sequence[int]) -> list[list[int]]:
    """Segments that have queries, in groups in which padding costs less than one more call; without keys apart."""
    empty = [s for s, length in enumerate(queries) if length and not keys[s]]
    groups = [empty] if empty else []
    longest = [0, 0]
    padding = 0
    rest = [s for s, length in enumerate(queries) if length and keys[s]]
    for segment in sorted(rest, key=lambda s: (keys[s], queries[s]), reverse=True):
        size = queries[segment], keys[segment]
        wider = [max(longest[0], size[0]), longest[1]]
        more = len(groups[-1]) * (wider[0] - longest[0]) * longest[1] if groups else 0
        padded = padding + more + wider[0] * wider[1] - size[0] * size[1]
        if longest[1] and padded <= CALL_SCORES:
            groups[-1].append(segment)
            longest, padding = wider, padded
        else:
            groups.append([segment])
            longest, padding = list(size), 0
    return groups


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _places(starts: Sequence[int], lengths: Sequence[int], longest: int) -> tuple[Tensor, Tensor]:
    """int64[n × longest] places, padding at the segment's first, and bool[n, longest] of which are real."""
    steps = torch.arange(longest)[None]
    real = steps < torch.tensor(lengths)[:, None]
    return (torch.tensor(starts)[:, None] + steps * real).flatten(), real
