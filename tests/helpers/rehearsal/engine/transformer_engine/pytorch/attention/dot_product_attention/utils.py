"""Which kernel attention runs in: on a Hopper, with cuDNN 9.19 and without flash-attn."""

from dataclasses import dataclass
from typing import Any

import torch

SMALLEST, LARGEST, MULTIPLE = 16, 256, 8
"""Channels of a head. The rules of cuDNN's frontend name 8, too; an H200 had no kernel for them (2026-11-26)."""


@dataclass(frozen=True)
class AttentionParams:
    """What is asked about: those of its fields that differ among packed rows."""

    qkv_dtype: torch.dtype = torch.bfloat16
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    softmax_type: str = "vanilla"


def get_cudnn_version() -> tuple[int, int, int]:
    """PyTorch's."""
    version = torch.backends.cudnn.version() or 0
    return version // 10_000, version // 100 % 100, version % 100


def get_attention_backend(attention_params: AttentionParams) -> tuple[Any, ...]:
    """Flash and its version, fused and its number, unfused; and which of the three there are."""
    asked = attention_params
    check_set_window_size(asked.attn_mask_type, asked.window_size)
    channels = {asked.head_dim_qk, asked.head_dim_v}
    fused = (
        asked.qkv_dtype in (torch.float16, torch.bfloat16)
        and (asked.qkv_layout != "thd_thd_thd" or "padding" in asked.attn_mask_type)
        and asked.num_heads % asked.num_gqa_groups == 0
        and all(SMALLEST <= size <= LARGEST and size % MULTIPLE == 0 for size in channels)
    )
    return False, None, fused, 1 if fused else None, not fused, [False, fused, True]


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """The window, which has to be the mask's, or a shorter one to the left of a causal mask's diagonal: another one is
    corrected there, with a warning each time."""
    is_causal = "causal" in attn_mask_type
    of_mask = (-1, 0) if is_causal else (-1, -1)
    is_shorter = is_causal and window_size is not None and window_size[0] >= 0 and window_size[1] == 0
    assert is_shorter or window_size in (None, of_mask), (
        f"window_size should be {of_mask} for attn_mask_type={attn_mask_type}"
    )
    return of_mask if window_size is None else (int(window_size[0]), int(window_size[1]))
