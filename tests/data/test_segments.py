"""Segments of packed rows, and masks drawn (x: forbidden)."""

import pytest
import torch
from torch import Tensor

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.data.segments import RowSegments, causal_mask, cross_mask, decoder_mask, encoder_mask


@pytest.mark.parametrize(
    ("starts", "length", "lengths", "positions", "longest"),
    [
        ((0, 3, 5, 9), 16, (3, 2, 4, 7), [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], 7),
        ((0, 5, 8), 8, (5, 3, 0), [0, 1, 2, 3, 4, 0, 1, 2], 5),
        ((0, 1), 8, (1, 7), [0, 0, 1, 2, 3, 4, 5, 6], 7),
    ],
    ids=["a tail", "no tail", "one position"],
)
def test_segments(starts, length, lengths, positions, longest) -> None:
    segments = RowSegments.of(starts, length)
    assert segments.lengths == lengths
    assert segments.offsets.tolist() == [*starts, length] and segments.offsets.dtype == torch.int32
    assert segments.positions.tolist() == [positions] and segments.positions.dtype == torch.int64
    assert segments.longest == longest and type(segments.longest) is int


@pytest.mark.parametrize("starts", [(1, 4), (0, 4, 4), (0, 6, 4), (0, 9)])
def test_offsets_that_are_not_of_the_row_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=f"to at most the row's 8 positions, got .{starts[0]}"):
        RowSegments.of(starts, 8)


def drawn(mask: Tensor) -> list[str]:
    """One string per query, samples one after another."""
    return ["".join("x" if forbidden else "." for forbidden in row) for row in mask.flatten(0, 2).tolist()]


LENGTHS = torch.tensor([2, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask", "shape", "expected"),
    [
        (encoder_mask(LENGTHS, 4), (2, 1, 4, 4), ["..xx"] * 4 + ["...."] * 4),
        (decoder_mask(LENGTHS, 4), (2, 1, 4, 4), [".xxx", "..xx", "..xx", "..xx", ".xxx", "..xx", "...x", "...."]),
        (cross_mask(LENGTHS, 3, 4), (2, 1, 3, 4), ["..xx"] * 3 + ["...."] * 3),
        (cross_mask(torch.tensor([1]), 2, 3), (1, 1, 2, 3), [".xx"] * 2),
        (causal_mask(3, "cpu"), (1, 1, 3, 3), [".xx", "..x", "..."]),
        (decoder_mask(torch.tensor([1]), 1), (1, 1, 1, 1), ["."]),
    ],
)
def test_masks(mask: Tensor, shape: tuple[int, ...], expected: list[str]) -> None:
    assert mask.dtype == torch.bool
    assert mask.shape == shape
    assert drawn(mask) == expected
    assert not mask.all(dim=-1).any(), "a query with nothing to attend to would be NaN"
