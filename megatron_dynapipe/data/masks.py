"""Attention masks from lengths, in the form of Megatron's local layers: True where attention is forbidden.

Masks depend on the key alone (and causality), never on whether the query is padding:

    encoder, input of 2, s = 4        decoder, 2 positions, t = 4
      query 0   . . x x                 query 0   . x x x
      query 1   . . x x                 query 1   . . x x
      padding   . . x x                 padding   . . x x
      padding   . . x x                 padding   . . x x

So no row forbids everything (a softmax over nothing would be NaN), no query ever looks at a padding key, and what
padding queries compute reaches neither real positions nor the loss. The masks are views that repeat one row or one
triangle where they can; do not write to them. Lengths are int[b], real positions of each sample, at least 1; their
device is the mask's.
"""

import torch
from torch import Tensor


def encoder_mask(input_lengths: Tensor, length: int) -> Tensor:
    """Self-attention of the encoder: bool[b, 1, length, length]."""
    return cross_mask(input_lengths, length, length)


def cross_mask(input_lengths: Tensor, target_length: int, input_length: int) -> Tensor:
    """Attention of the decoder to the encoder's output: bool[b, 1, target_length, input_length]."""
    return _padding(input_lengths, input_length).expand(-1, -1, target_length, -1)


def decoder_mask(decoder_lengths: Tensor, length: int) -> Tensor:
    """Self-attention of the decoder, causal and without padding keys: bool[b, 1, length, length]."""
    return _padding(decoder_lengths, length) | causal_mask(length, decoder_lengths.device)


def causal_mask(length: int, device: torch.device | str) -> Tensor:
    """Self-attention of a decoder-only model: bool[1, 1, length, length].

    Padding stands at the end of a sequence, where causality already hides it from every real position.
    """
    positions = torch.arange(length, device=device)
    return (positions[None, :] > positions[:, None])[None, None]


def _padding(lengths: Tensor, length: int) -> Tensor:
    """Which keys are padding: bool[b, 1, 1, length]."""
    positions = torch.arange(length, device=lengths.device)
    return (positions[None, :] >= lengths[:, None])[:, None, None, :]
