"""Attention masks in the form that layers expect, from those of `data.masks`: True where attention is forbidden."""

from typing import Any

from torch import Tensor


class LocalMasks:
    """As they come: [b, 1, queries, keys]."""

    @staticmethod
    def encoder(mask: Tensor) -> Any:
        """Self-attention of the encoder."""
        return mask

    @staticmethod
    def decoder(mask: Tensor) -> Any:
        """Self-attention of the decoder."""
        return mask

    @staticmethod
    def cross(_decoder: Tensor, cross: Tensor) -> Any:
        """Attention of the decoder to the encoder's output."""
        return cross


class TransformerEngineMasks:
    """Padding alone, [b, 1, 1, length], a pair of them for attention to another sequence; causality is built in.

    Source: Transformer Engine's `DotProductAttention` ("attention_mask"; mask types "padding" and "causal"), and what
    Megatron's T5 data set makes for it. Not yet run: Transformer Engine could not be installed where this was written.
    """

    @staticmethod
    def encoder(mask: Tensor) -> Any:
        """Self-attention of the encoder: which keys are padding."""
        return mask[:, :, :1]

    @staticmethod
    def decoder(_mask: Tensor) -> Any:
        """Self-attention of the decoder: padding stands at the end, where causality hides it."""
        return None

    @staticmethod
    def cross(decoder: Tensor, cross: Tensor) -> Any:
        """Attention of the decoder to the encoder's output: padding of queries, padding of keys."""
        return decoder[:, :, -1:], cross[:, :, :1]
