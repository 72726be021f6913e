"""Transformer Engine's attention over packed rows: FlashAttention 3 or cuDNN on Hopper, where PyTorch has version 2.

Format "thd": cuDNN's plans are made for numbers of tokens and samples rounded up to powers of two, so that they are few
where shapes change. Padded rows are of too many shapes for that and stay with PyTorch.

Which rows have a fused kernel depends on the versions of cuDNN and flash-attn (heads of 8 channels have none in cuDNN
9.19, although its rules name them). Transformer Engine is asked, once for each kind of row: what it would compute
unfused, keeping all scores, runs in PyTorch's FlashAttention.
"""

import functools
import importlib
from typing import Any, override

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.packed_rows import PackedRow

ENGINE = "transformer_engine.pytorch"
_INSTEAD = "PyTorch's FlashAttention runs"
ASKED_LENGTH = 128
"""Positions of the two samples in the row that Transformer Engine is asked about; kernels take any length."""


class EngineCoreAttention(SdpaCoreAttention):
    """`SdpaCoreAttention` with Transformer Engine's kernels for packed rows without biases or dropout."""

    @override
    def attend_in_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, *, causal: bool
    ) -> Tensor:
        # A piece's queries are the last of its keys: causal from the bottom right.
        has_prefix = isinstance(row, PackedRow) and row.has_prefix
        mask = "padding" + "_causal" * causal + "_bottom_right" * has_prefix
        sizes = query.size(1), key.size(1), query.size(2)
        if not has_fused_kernel(*sizes, query.dtype, mask):
            return super().attend_in_kernel(query, key, value, row, causal=causal)
        kind = "self" if row.cu_seqlens_q is row.cu_seqlens_kv else "cross"
        attended: Tensor = _attention(*sizes, self.softmax_scale, mask, kind)(
            query,
            key,
            value,
            cu_seqlens_q=row.cu_seqlens_q,
            cu_seqlens_kv=row.cu_seqlens_kv,
            max_seqlen_q=row.max_seqlen_q,
            max_seqlen_kv=row.max_seqlen_kv,
            pad_between_seqs=False,  # versions that find out for themselves wait for the device
        )
        return attended.view_as(query)


@functools.cache
def has_fused_kernel(
    heads: int, groups: int, channels: int, dtype: torch.dtype, mask: str, *, instead: str = _INSTEAD, **special: object
) -> bool:
    """Whether Transformer Engine has a kernel that keeps no scores for packed rows of such heads; says so if not.

    Args:
        heads: heads of queries.
        groups: groups of keys and values.
        channels: channels of a head.
        dtype: the type of queries, keys and values.
        mask: its type.
        instead: what runs without one.
        special: fields of `AttentionParams` that the others do not give: other channels of values, a window, sinks.
    """
    utils = importlib.import_module(f"{ENGINE}.attention.dot_product_attention.utils")
    row = utils.AttentionParams(
        qkv_dtype=dtype,
        qkv_layout="thd_thd_thd",
        batch_size=2,
        num_heads=heads,
        num_gqa_groups=groups,
        max_seqlen_q=ASKED_LENGTH,
        max_seqlen_kv=ASKED_LENGTH,
        num_tokens_q=2 * ASKED_LENGTH,
        num_tokens_kv=2 * ASKED_LENGTH,
        head_dim_qk=channels,
        attn_mask_type=mask,
        bottom_right_diagonal=mask != "padding_causal",
        **{"head_dim_v": channels, "window_size": (-1, 0) if "causal" in mask else (-1, -1)} | special,
    )
    *_, (flash, fused, _unfused) = utils.get_attention_backend(row)
    if not (flash or fused):
        kind = f"heads of {channels} channels, {str(dtype).removeprefix('torch.')}, mask {mask}"
        kind += "".join(f", {name} {value}" for name, value in special.items())
        print(
            f"Transformer Engine has no fused attention for {kind}: {instead}{two_cudnns(utils.get_cudnn_version())}",
            flush=True,
        )
    return bool(flash or fused)


def two_cudnns(of_engine: tuple[int, int, int]) -> str:
    """What to do if Transformer Engine has opened another cuDNN than PyTorch's; empty if there is one.

    It looks for one in CUDNN_HOME, in the toolkit and among the system's libraries before it takes PyTorch's. Of two
    versions in a process, each finds libraries of the other, and answers CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.
    """
    version = torch.backends.cudnn.version() or 0
    of_pytorch = (version // 10_000, version // 100 % 100, version % 100)
    if of_pytorch == of_engine:
        return ""
    names = [".".join(map(str, numbers)) for numbers in (of_engine, of_pytorch)]
    return (
        f"; it has opened cuDNN {names[0]} next to PyTorch's {names[1]}, and neither works like that: set CUDNN_HOME to"
        " the folder nvidia/cudnn of PyTorch's packages"
    )


@functools.cache
def _attention(heads: int, groups: int, channels: int, scale: float, mask: str, kind: str) -> Any:
    """One for all layers, which it has no state of; outside of the model, to whose checkpoints it would add some.

    It is made for its mask and its kind of attention: a call that names another mask has its window corrected, with a
    warning each time.
    """
    return importlib.import_module(ENGINE).DotProductAttention(
        heads,
        channels,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type=mask,
        attention_type=kind,
        softmax_scale=scale,
    )
