"""A core attention over PyTorch's `scaled_dot_product_attention`, in place of Megatron's unfused one.

Megatron's local `DotProductAttention` keeps the scores of all heads, [b, heads, queries, keys], several times over, and
refuses additive biases. PyTorch picks a kernel that keeps none of them where it has one for the device and the inputs;
packed sequences, sliding windows and attention sinks stay with Transformer Engine.
"""

import contextlib
import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_dynapipe.errors import ConfigError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class SdpaCoreAttention(MegatronModule):
    """A drop-in for Megatron's local `DotProductAttention`: the same constructor, inputs and results.

    Differs from it in one case: a query for which every key is forbidden. Megatron gives it the mean of all values,
    here its result is undefined. The masks of `data.masks` have no such row.

    Args:
        config: the model's configuration.
        layer_number: not looked at: scaling by layer cancels out where the softmax is computed in fp32.
        attn_mask_type: causal attention hides later keys where no mask is given.
        attention_type: not looked at, as in Megatron.
        attention_dropout: probability of dropping a weight; the configuration's if None.
        softmax_scale: factor of the scores; 1 / √(head size) if None.
        cp_comm_type: not looked at.
        pg_collection: not looked at: heads are divided before they come here.

    Raises:
        ConfigError: the configuration asks for what this attention does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        for refused, what in (
            (config.context_parallel_size > 1, "context parallelism"),
            (config.window_size is not None, "sliding windows"),
            (config.softmax_type != "vanilla", f"the {config.softmax_type} softmax"),
        ):
            if refused:
                raise ConfigError(
                    f"the attention over scaled_dot_product_attention does not have {what}",
                    hint="use --dynapipe-attention megatron, or --transformer-impl transformer_engine",
                )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [queries, b, heads, head size], of this tensor-parallel rank's heads.
            key: [keys, b, groups, head size]; every group serves heads / groups heads.
            value: likewise.
            attention_mask: bool, broadcast to [b, heads, queries, keys]; True where attention is forbidden.
            attn_mask_type: in place of the constructor's.
            attention_bias: broadcast to [b, heads, queries, keys]; added to the scaled scores.
            packed_seq_params: refused.

        Returns:
            [queries, b, heads × head size].
        """
        assert packed_seq_params is None, "packed sequences need Transformer Engine's attention"
        causal = attention_mask is None and (attn_mask_type or self.attn_mask_type) in _CAUSAL
        heads_per_group = query.size(2) // key.size(2)
        if heads_per_group > 1:  # repeated, since PyTorch's fused kernels with masks want one group per head
            key, value = (tensor.repeat_interleave(heads_per_group, dim=2) for tensor in (key, value))
        mask: Tensor | None = None
        if attention_bias is not None:
            if causal:
                attention_mask = _later_keys(query.size(0), key.size(0), query.device)
            mask = attention_bias.to(query.dtype)
            if attention_mask is not None:
                mask = mask.masked_fill(attention_mask, -math.inf)
        elif attention_mask is not None:
            mask = ~attention_mask
        with self._randomness():
            attended = scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal and mask is None,
                scale=self.softmax_scale,
            )
        return attended.permute(2, 0, 1, 3).flatten(2)

    def _randomness(self) -> contextlib.AbstractContextManager[Any]:
        """Heads on different tensor-parallel ranks drop different weights, as in Megatron."""
        if not self.training or not self.dropout or self.config.sequence_parallel:
            return contextlib.nullcontext()
        tracker: contextlib.AbstractContextManager[Any] = get_cuda_rng_tracker().fork()
        return tracker


def _later_keys(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool[1, 1, queries, keys]: True for keys after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)[None, None]
