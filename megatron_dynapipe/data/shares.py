"""One replica's share of samples that a team runs together (`ways.teams_rule`), in rows as attention takes them.

    a sample of 11 positions, place 1 of 2     its positions    3 4 5 | 6 7 8             two segments, of a chunk each
    all members' keys, one after another       0 1 2 9 10 . | 3 4 5 6 7 8
    the keys that its segments attend to       0 1 2 3 4 5 | 0 1 2 3 4 5 6 7 8            their own are the last

In a packed row every sample has chunks of its own length; of padded rows all have chunks of half a row.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_dynapipe.core.plan import MicroBatch, Share, row_offsets
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, input_positions
from megatron_dynapipe.data.segments import RowSegments


def chunk_of(family: ModelFamily, plan: MicroBatch, number: int) -> int:
    """Positions of a chunk of a micro-batch's sample of that number."""
    packed = plan.layout is BatchLayout.PACKED
    return (plan.positions(family)[number] if packed else plan.shape.input_length) // 2


def held(values: npt.NDArray[Any], share: Share, chunk: int, fill: int) -> npt.NDArray[Any]:
    """What a share has of a sample's values, one for each of its positions, filled up to two chunks."""
    ranks, _ = share
    return np.pad(values, (0, 2 * ranks * chunk - len(values)), constant_values=fill)[_positions(share, chunk)]


def share_segments(family: ModelFamily, plan: MicroBatch) -> RowSegments:
    """The segments of a micro-batch of shares: two of each sample, and a packed row's tail.

    Padded rows follow one another here. Positions are int64[1, s]; those that fill a sample up have its last one's, so
    that tables of positions end where samples do.
    """
    size, length, _ = plan.shape
    packed = plan.layout is BatchLayout.PACKED
    starts = row_offsets(family, plan).inputs if packed else range(0, size * length + 1, length)
    tail = size * length - starts[-1]
    ranks, place = plan.share
    lengths, before, positions, places = [], [], [], []
    for number, tokens in enumerate(plan.input_lengths):
        chunk = chunk_of(family, plan, number)
        last = input_positions(family, tokens if packed else max(plan.input_lengths)) - 1
        positions.append(np.minimum(_positions(plan.share, chunk), last))
        for earlier in (place, 2 * ranks - 1 - place):
            lengths.append(chunk)
            before.append(earlier * chunk)
            member, at = _places((earlier + 1) * chunk, ranks, chunk)
            # Gathered keys of padded rows lie as a layer has them: all rows' first positions, their second ones, …
            places.append(member * size * length + (starts[number] + at if packed else at * size + number))
    places.append(place * size * length + np.arange(starts[-1], size * length))
    row = np.concatenate([*positions, np.arange(tail)]) if packed else positions[0]
    offsets, keys = (
        np.cumsum([0, *lengths, tail], dtype=np.int32),
        np.cumsum([0, *np.add(lengths, before), tail], dtype=np.int32),
    )
    return RowSegments(
        offsets=torch.from_numpy(offsets),
        positions=torch.from_numpy(row[None]),
        lengths=(*lengths, tail),
        key_offsets=torch.from_numpy(keys),
        key_places=torch.from_numpy(np.concatenate(places)),
        ranks=ranks,
    )


def _positions(share: Share, chunk: int) -> npt.NDArray[np.int64]:
    """The positions of a share's two chunks in their sample."""
    ranks, place = share
    return np.concatenate([np.arange(first * chunk, (first + 1) * chunk) for first in (place, 2 * ranks - 1 - place)])


def _places(keys: int, ranks: int, chunk: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The member that has each of a sample's first keys, and where among its positions of that sample."""
    number, within = np.divmod(np.arange(keys), chunk)
    return np.minimum(number, 2 * ranks - 1 - number), within + chunk * (number >= ranks)
