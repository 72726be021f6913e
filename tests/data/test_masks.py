"""Masks drawn (x: forbidden)."""

import pytest
import torch
from torch import Tensor

from megatron_dynapipe.data.segments import causal_mask, cross_mask, decoder_mask, encoder_mask


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
def test_drawn(mask: Tensor, shape: tuple[int, ...], expected: list[str]) -> None:
    assert mask.dtype == torch.bool
    assert mask.shape == shape
    assert drawn(mask) == expected
    assert not mask.all(dim=-1).any(), "a query with nothing to attend to would be NaN"
