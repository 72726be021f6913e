"""Masks drawn (x: forbidden), and what they are for: padding never reaches a real position."""

from collections.abc import Callable

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


def attend(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Attention as Megatron's local layers do it: scores of forbidden pairs become -10000. All are [b, n, h]."""
    scores = (queries @ keys.transpose(1, 2)).masked_fill(mask.squeeze(1), -10_000.0)
    return torch.softmax(scores, dim=-1) @ keys


@pytest.mark.parametrize("mask", [encoder_mask, decoder_mask, lambda lengths, size: causal_mask(size, lengths.device)])
def test_padding_never_reaches_real_positions(mask: Callable[[Tensor, int], Tensor]) -> None:
    """Two layers of self-attention over a padded batch: as each sample alone, and no gradient at padding."""
    torch.manual_seed(0)
    states = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    forbidden = mask(LENGTHS, 4)
    out = attend(*(attend(states, states, forbidden),) * 2, forbidden)
    assert torch.isfinite(out).all()
    alone = []
    for row, length in enumerate(LENGTHS.tolist()):
        one = states[row : row + 1, :length].detach()
        unpadded = mask(LENGTHS[row : row + 1], length)
        alone.append(attend(*(attend(one, one, unpadded),) * 2, unpadded))
        assert torch.allclose(out[row, :length], alone[-1][0], rtol=1e-12)
    loss_mask = torch.arange(4)[None, :] < LENGTHS[:, None]
    (out.sum(-1) * loss_mask).sum().backward()
    assert states.grad is not None
    assert torch.equal(states.grad[0, 2:], torch.zeros(2, 8, dtype=torch.float64))
    assert states.grad[0, :2].abs().sum() > 0


def test_padding_never_reaches_the_decoder() -> None:
    torch.manual_seed(0)
    decoder = torch.randn(2, 3, 8, dtype=torch.float64)
    encoder = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    out = attend(decoder, encoder, cross_mask(LENGTHS, 3, 4))
    assert torch.allclose(out[0], attend(decoder[:1], encoder[:1, :2], torch.zeros(1, 1, 3, 2, dtype=torch.bool))[0])
    out.sum().backward()
    assert encoder.grad is not None
    assert torch.equal(encoder.grad[0, 2:], torch.zeros(2, 8, dtype=torch.float64))
