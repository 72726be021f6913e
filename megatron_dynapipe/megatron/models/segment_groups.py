"""Segments of a packed row in groups of like lengths, for attention without a kernel for packed rows.

    row       a a a a b b c c c d              groups    a a a a     b b
    places    0 1 2 3 4 5 6 7 8 9                        c c c ·     d ·

One call of attention per segment costs more in launches than in work; one call for all pads too much. Groups pad as
long as that costs less than another call. Only attention is padded so: everything else runs on the row.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
        apart: its only segment, where that is to be attended to apart.
    """

    count: int
    queries: int
    keys: int
    query_places: Tensor
    key_places: Tensor
    real_keys: Tensor | None
    apart: int | None = None


def group_segments(
    queries: Sequence[int], keys: Sequence[int], device: torch.device, apart: Set[int] = frozenset()
) -> tuple[Sequence[SegmentGroup], Tensor]:
    """Group the segments of a row.

    Args:
        queries: positions of every segment in the row of queries.
        keys: in the row of keys.
        device: where the tensors go.
        apart: segments that have a group each.

    Returns:
        Groups of all segments that have queries; and int64[t], where each of the row's queries is among the groups'
        queries, one group after another.
    """
    together = [0 if segment in apart else length for segment, length in enumerate(queries)]
    like = [*like_segments(together, keys), *([segment] for segment in sorted(apart))]
    most_queries = [max(queries[segment] for segment in segments) for segments in like]
    most_keys = [max(keys[segment] for segment in segments) for segments in like]
    counts = np.array([len(segments) for segments in like], np.int64)
    order = np.array([segment for segments in like for segment in segments], np.int64)
    query_places, is_query = _places(queries, order, np.repeat(np.array(most_queries, np.int64), counts))
    key_places, is_key = _places(keys, order, np.repeat(np.array(most_keys, np.int64), counts))
    back = np.zeros(sum(queries), np.int64)
    back[query_places[is_query]] = np.flatnonzero(is_query)
    of_queries = (counts * most_queries).tolist()
    of_keys = (counts * most_keys).tolist()
    query_places_of = _on(device, query_places).split(of_queries)
    key_places_of = _on(device, key_places).split(of_keys)
    is_key_of = _on(device, is_key).split(of_keys)
    groups = []
    for group, segments in enumerate(like):
        width = most_keys[group]
        is_padded = any(keys[segment] < width for segment in segments)
        groups.append(
            SegmentGroup(
                count=len(segments),
                queries=most_queries[group],
                keys=width,
                query_places=query_places_of[group],
                key_places=key_places_of[group],
                real_keys=is_key_of[group].view(-1, 1, 1, width) if is_padded else None,
                apart=segments[0] if segments[0] in apart else None,
            )
        )
    return groups, _on(device, back)


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
            longest = wider
            padding = padded
        else:
            groups.append([segment])
            longest = list(size)
            padding = 0
    return groups


def _places(
    lengths: Sequence[int], order: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The places in the row of the positions of segments in an order, each padded to a width, and which are real.

    Padding is at the segment's first position.
    """
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    steps = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    real = steps < np.repeat(sizes[order], widths)
    return np.repeat(starts[order], widths) + steps * real, real


def _on(device: torch.device, values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(device)
