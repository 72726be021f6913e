"""Segments of packed rows, as tables checked by eye."""

import pytest
import torch

from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.errors import PlanError


@pytest.mark.parametrize(
    ("starts", "length", "lengths", "positions", "longest"),
    [
        ((0, 3, 5, 9), 16, (3, 2, 4, 7), [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], 7),
        ((0, 5, 8), 8, (5, 3, 0), [0, 1, 2, 3, 4, 0, 1, 2], 5),
        ((0, 1), 8, (1, 7), [0, 0, 1, 2, 3, 4, 5, 6], 7),
    ],
    ids=["a tail", "no tail", "one position"],
)
def test_segments(
    starts: tuple[int, ...], length: int, lengths: tuple[int, ...], positions: list[int], longest: int
) -> None:
    segments = RowSegments.of(starts, length)
    assert segments.lengths == lengths
    assert segments.offsets.tolist() == [*starts, length] and segments.offsets.dtype == torch.int32
    assert segments.positions.tolist() == [positions] and segments.positions.dtype == torch.int64
    assert segments.longest == longest and type(segments.longest) is int


@pytest.mark.parametrize("starts", [(1, 4), (0, 4, 4), (0, 6, 4), (0, 9)])
def test_offsets_that_are_not_of_the_row_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=f"to at most the row's 8 positions, got .{starts[0]}"):
        RowSegments.of(starts, 8)
