"""Attention masks in the forms that layers expect, from those of `data.segments`: True where attention is forbidden.

They are made once per micro-batch and stage, for all its layers.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dynapipe.errors import ConfigError


class Masks(Protocol):
    """One form of masks."""

    def encoder(self, mask: Tensor) -> Any:
        """Self-attention of the encoder."""

    def decoder(self, mask: Tensor) -> Any:
        """Self-attention of the decoder."""

    def cross(self, decoder: Tensor, cross: Tensor) -> Any:
        """Attention of the decoder to the encoder's output."""


class MegatronMasks(Masks):
    """As they come: [b, 1, queries, keys]."""

    def encoder(self, mask: Tensor) -> Any:
        """Padding keys, for every query."""
        return mask

    def decoder(self, mask: Tensor) -> Any:
        """Padding and later keys."""
        return mask

    def cross(self, decoder: Tensor, cross: Tensor) -> Any:
        """Padding keys, for every query."""
        return cross


class SdpaMasks(Masks):
    """As PyTorch's kernels add them to scores: 0 or -inf, [b, 1, 1, keys], which serves all queries.

    A boolean mask would be turned into this one by every layer, and kept by each for its backward pass.

    Args:
        dtype: of the scores.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encoder(self, mask: Tensor) -> Tensor:
        """Padding keys."""
        return added(mask[:, :, :1], self._dtype)

    def decoder(self, mask: Tensor) -> None:
        """None: padding stands at the end, where causality hides it; a causal kernel needs no mask."""

    def cross(self, decoder: Tensor, cross: Tensor) -> Tensor:
        """Padding keys."""
        return added(cross[:, :, :1], self._dtype)


def added(forbidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: -inf where `forbidden`, else 0."""
    return torch.zeros(forbidden.shape, dtype=dtype, device=forbidden.device).masked_fill_(forbidden, -math.inf)


class NoMasks(Masks):
    """None: the layers of Transformer Engine are given rows (`padded_rows`, `packed_rows`), and masks are refused."""

    def encoder(self, mask: Tensor) -> Any:
        """Raises ConfigError."""
        raise _expected_rows("encoder_row")

    def decoder(self, mask: Tensor) -> Any:
        """Raises ConfigError."""
        raise _expected_rows("decoder_row")

    def cross(self, decoder: Tensor, cross: Tensor) -> Any:
        """Raises ConfigError."""
        raise _expected_rows("decoder_row")


def _expected_rows(name: str) -> ConfigError:
    return ConfigError(
        "expected rows for the layers of Transformer Engine, got masks", hint=f"give T5StageInputs its {name}"
    )
