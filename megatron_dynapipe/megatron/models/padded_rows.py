"""Padded rows in the form that Transformer Engine's attention takes without masks: where each row's tokens end.

    lengths    3 1 2          tokens of every row
    offsets    0 3 4 6        cumulative lengths; [b, 1, 1, length] masks are never made

From a mask every layer would count the tokens again, and for FlashAttention find their places with `nonzero`, which
waits for the device; and Megatron's recomputation can save no pair of masks, which cross-attention would take. Offsets
are made once per micro-batch, on the device, and are not read back.

Source: `DotProductAttention` of Transformer Engine 2.20.2 and `TEDotProductAttention` of megatron-core 0.19.2, which
hands the fields of `PackedSeqParams` on in any format.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

PADDED_FORMAT = "sbhd"
"""`qkv_format` of rows next to one another: [length, b, heads, channels]."""


@dataclass(eq=False)
class AttentionRows(PackedSeqParams):
    """A micro-batch's rows as attention takes them: Megatron's parameters, and what it does not know.

    Attributes:
        positions: int64[1, t], each query's place in its sample; None where it is the place in the row.
        cross: in a decoder, what its cross-attention takes: the decoder's queries, the encoder's keys.
    """

    positions: Tensor | None = None
    cross: "AttentionRows | None" = None

    def pick(self, rotations: Tensor) -> Tensor:
        """Rotations [t, 1, 1, channels] of every position, picked from the first positions'."""
        return rotations


def encoder_rows(lengths: Tensor, length: int) -> AttentionRows:
    """The rows of an encoder's self-attention (mask type "padding"): int[b] tokens of rows of `length` positions."""
    return _attention(lengths, length, lengths, length)


def decoder_rows(lengths: Tensor, length: int, encoder_lengths: Tensor, encoder_length: int) -> AttentionRows:
    """The arguments of a decoder: self-attention only what is causal, which hides padding, as it stands at the end."""
    return AttentionRows(
        qkv_format=PADDED_FORMAT,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        cross=_attention(lengths, length, encoder_lengths, encoder_length),
    )


def _attention(queries: Tensor, query_length: int, keys: Tensor, key_length: int) -> AttentionRows:
    offsets = _offsets(queries)
    return AttentionRows(
        qkv_format=PADDED_FORMAT,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets if keys is queries else _offsets(keys),
        max_seqlen_q=query_length,
        max_seqlen_kv=key_length,
    )


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    return offsets
