"""Transformer Engine's attention over packed rows: FlashAttention 3 or cuDNN on Hopper, where PyTorch has version 2.

Format "thd": cuDNN's plans are made for numbers of tokens and samples rounded up to powers of two, so that they are few
where shapes change. Padded rows are of too many shapes for that and stay with PyTorch.
"""

import functools
import importlib
from typing import Any, override

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dynapipe.integration.models.attention import SdpaCoreAttention
from megatron_dynapipe.integration.models.packed_rows import PackedRow


class EngineCoreAttention(SdpaCoreAttention):
    """`SdpaCoreAttention` with Transformer Engine's kernels for packed rows without biases or dropout."""

    @override
    def attend_in_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, *, causal: bool
    ) -> Tensor:
        # A piece's queries are the last of its keys: causal from the bottom right.
        has_prefix = isinstance(row, PackedRow) and row.has_prefix
        causality = "_causal" * causal + "_bottom_right" * has_prefix
        attended: Tensor = _attention(query.size(1), key.size(1), query.size(2), self.softmax_scale)(
            query,
            key,
            value,
            qkv_format="thd",
            cu_seqlens_q=row.cu_seqlens_q,
            cu_seqlens_kv=row.cu_seqlens_kv,
            max_seqlen_q=row.max_seqlen_q,
            max_seqlen_kv=row.max_seqlen_kv,
            attn_mask_type=f"padding{causality}",
            pad_between_seqs=False,  # versions that find out for themselves wait for the device
        )
        return attended.view_as(query)


@functools.cache
def _attention(heads: int, groups: int, channels: int, scale: float) -> Any:
    """One for all layers, which it has no state of; outside of the model, to whose checkpoints it would add some."""
    engine = importlib.import_module("transformer_engine.pytorch")
    return engine.DotProductAttention(
        heads, channels, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd", softmax_scale=scale
    )
