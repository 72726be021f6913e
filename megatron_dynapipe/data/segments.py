"""Where the samples of a packed row lie, in the form that attention over it takes.

    row         a a a b b c c c c . . .      rounded up; the tail is a segment of its own
    offsets     0     3   5       9     12   one more than there are segments
    positions   0 1 2 0 1 0 1 2 3 0 1 2      they start again with every segment

Every row has a last segment for its tail, which may be empty: then the segments of a T5's two rows match one to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dynapipe.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSegments:
    """The segments of one packed row, on the host.

    Attributes:
        offsets: int32[segments + 1], the first position of every segment, and the row's length.
        positions: int64[1, length], each position's place in its segment.
        lengths: positions of every segment; the last is the tail's.
    """

    offsets: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Positions of the longest segment."""
        return max(self.lengths)

    @classmethod
    def of(cls, starts: Sequence[int], length: int) -> "RowSegments":
        """The segments of a row of `length` positions, from where its samples begin and where the last one ends.

        Raises:
            PlanError: the samples do not lie one after another within the row.
        """
        offsets = np.array([*starts, length], np.int32)
        lengths = np.diff(offsets)
        if offsets[0] != 0 or (lengths[:-1] < 1).any() or lengths[-1] < 0:
            raise PlanError(
                f"expected offsets that rise from 0 to at most the row's {length} positions, got {list(starts)}"
            )
        positions = np.arange(length) - np.repeat(offsets[:-1], lengths)
        return cls(
            offsets=torch.from_numpy(offsets),
            positions=torch.from_numpy(positions[None]),
            lengths=tuple(lengths.tolist()),
        )
