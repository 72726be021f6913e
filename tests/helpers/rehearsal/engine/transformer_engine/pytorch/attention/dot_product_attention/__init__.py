"""Attention over padded rows ("sbhd") and over rows of samples that offsets divide ("thd")."""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    check_set_window_size,
    get_attention_backend,
)

MASKS = {
    "no_mask": "",
    "padding": "",
    "causal": "top",
    "padding_causal": "top",
    "causal_bottom_right": "bottom",
    "padding_causal_bottom_right": "bottom",
}
"""Types of masks, and from which corner each is causal."""


class DotProductAttention(nn.Module):
    """Softmax attention. Arguments of kernels and sinks that change a result are not taken."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        assert softmax_type in ("vanilla", "learnable"), softmax_type
        of_heads = torch.zeros(num_attention_heads // tp_size, device="cuda")
        self.softmax_offset = nn.Parameter(of_heads) if softmax_type == "learnable" else None
        kv_channels, self.value_channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.heads, self.groups = num_attention_heads // tp_size, (num_gqa_groups or num_attention_heads) // tp_size
        self.channels, self.dropout, self.qkv_format = kv_channels, attention_dropout, qkv_format
        self.attn_mask_type, self.tracker = attn_mask_type, None if sequence_parallel else get_rng_state_tracker
        self.attention_type, self.window_size = attention_type, check_set_window_size(attn_mask_type, window_size)
        self.softmax_scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "fp8 is not rehearsed"

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """[positions, …, heads × channels]."""
        kind, rows = attn_mask_type or self.attn_mask_type, (query_layer, key_layer, value_layer)
        check_set_window_size(kind, self.window_size)
        assert all(row.is_cuda for row in rows), "DotProductAttention only supports CUDA tensors."
        assert query_layer.shape[-2:] == (self.heads, self.channels) and key_layer.size(-2) == self.groups
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None and not pad_between_seqs
        if (qkv_format or self.qkv_format) == "thd":
            assert query_layer.dtype in (torch.float16, torch.bfloat16), "No dot product attention backend is available"
            assert "padding" in kind and core_attention_bias is None, f"{kind} with or without a bias: no backend"
            assert cu_seqlens_q is not None and cu_seqlens_kv is not None
            longest = (cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)
            assert all(most is not None and int(offsets.diff().max()) <= most for offsets, most in longest)
            spans = _spans(cu_seqlens_q), _spans(cu_seqlens_kv)
            self._check_unfused(query_layer.dtype, *spans, kind)
            return self._packed(rows, *spans, kind)
        assert (core_attention_bias_type == "post_scale_bias") == (core_attention_bias is not None)
        assert core_attention_bias is None or core_attention_bias.is_contiguous()
        hidden = None
        if "padding" in kind:
            hidden = _padding(attention_mask, (cu_seqlens_q, cu_seqlens_kv), query_layer, key_layer)
        # [b, heads, positions, channels]
        query, key, value = (row.permute(1, 2, 0, 3) for row in rows)
        keys = None if hidden is None else hidden[1][:, None, None]
        output = self._attend(query, key, value, kind, core_attention_bias, keys).permute(2, 0, 1, 3)
        if hidden is not None:
            output = output.masked_fill(hidden[0].t()[:, :, None, None], 0.0)  # kernels leave zeros there
        return output.flatten(2)

    def _check_unfused(self, dtype: torch.dtype, of_q: list[slice], of_k: list[slice], kind: str) -> None:
        """Without a fused kernel a module for self-attention makes the mask of keys from the queries' lengths."""
        sizes = {"num_heads": self.heads, "num_gqa_groups": self.groups}
        sizes |= {"head_dim_qk": self.channels, "head_dim_v": self.value_channels}
        asked = AttentionParams(dtype, "thd_thd_thd", attn_mask_type=kind, window_size=self.window_size, **sizes)
        longest = [max(span.stop - span.start for span in spans) for spans in (of_q, of_k)]
        if get_attention_backend(asked)[4] and self.attention_type == "self" and longest[0] != longest[1]:
            raise RuntimeError(f"The size of tensor a ({longest[1]}) must match the size of tensor b ({longest[0]})")

    def _packed(self, rows: tuple[Tensor, ...], of_q: list[slice], of_k: list[slice], kind: str) -> Tensor:
        query, key, value = (row.transpose(0, 1) for row in rows)
        samples = [
            self._attend(query[:, q], key[:, k], value[:, k], kind).transpose(0, 1)
            for q, k in zip(of_q, of_k, strict=True)
        ]
        left = rows[0][of_q[-1].stop :]  # behind the last offset kernels leave zeros
        return torch.cat([*samples, torch.zeros_like(left)]).flatten(1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, kind: str, bias: Tensor | None = None, hidden: Any = None
    ) -> Tensor:
        """[…, heads, queries, channels] of `query`; keys where `hidden` are not looked at."""
        key, value = (row.repeat_interleave(self.heads // self.groups, -3) for row in (key, value))
        scores = (query.float() @ key.float().transpose(-1, -2)) * self.softmax_scale
        scores = scores if bias is None else scores + bias
        if MASKS[kind]:
            diagonal = 1 + (scores.size(-1) - scores.size(-2)) * (MASKS[kind] == "bottom")
            everything = torch.ones_like(scores, dtype=torch.bool)
            scores = scores.masked_fill(everything.triu(diagonal), -torch.inf)
            if (left := self.window_size[0]) >= 0:
                scores = scores.masked_fill(everything.tril(diagonal - left - 2), -torch.inf)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if self.softmax_offset is not None:  # a key of no value, of each head's own score
            sinks = self.softmax_offset.float()[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1).nan_to_num(0.0)
        with nullcontext() if self.tracker is None else self.tracker().fork():
            weights = nn.functional.dropout(weights, self.dropout, self.training)
        return (weights @ value.float()).to(query.dtype)


def _spans(offsets: Tensor) -> list[slice]:
    assert offsets.dtype == torch.int32 and offsets.is_cuda and offsets.dim() == 1
    return [slice(start, end) for start, end in pairwise(offsets.tolist())]


def _padding(mask: Any, offsets: tuple[Tensor | None, ...], query: Tensor, key: Tensor) -> list[Tensor]:
    """bool[b, positions] of queries and of keys, from a mask [b, 1, 1, positions], a pair of them, or offsets."""
    if mask is not None:
        pair = mask if isinstance(mask, tuple) else (mask, mask)
        return [hidden[:, 0, 0] for hidden in pair]
    assert all(ends is not None and ends.dtype == torch.int32 and ends.numel() == query.size(1) + 1 for ends in offsets)
    sides = zip((query, key), offsets, strict=True)
    return [torch.arange(row.size(0), device=row.device) >= ends.diff()[:, None] for row, ends in sides]
