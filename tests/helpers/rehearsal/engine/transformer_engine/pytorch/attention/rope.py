"""Rotary positions."""

from itertools import pairwise

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turn the first channels of `t`, [s, b, h, d] or [t, h, d], by angles [positions, 1, 1, channels] in fp32."""
    assert fused and cp_size == 1 and not interleaved and freqs.dtype == torch.float32
    if tensor_format == "sbhd":
        return _turned(t, freqs[: t.size(0)])
    assert tensor_format == "thd" and cu_seqlens is not None and cu_seqlens.dtype == torch.int32
    spans = pairwise(cu_seqlens.tolist())
    parts = [_turned(t[start:end], freqs[: end - start, 0]) for start, end in spans]
    return torch.cat([*parts, torch.zeros_like(t[int(cu_seqlens[-1]) :])])


def _turned(rows: Tensor, angles: Tensor) -> Tensor:
    turned, rest = rows.float().split([angles.size(-1), rows.size(-1) - angles.size(-1)], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned, rest], -1).to(rows.dtype)
