"""A core attention over PyTorch's `scaled_dot_product_attention`, in place of Megatron's unfused one.

Megatron's local `DotProductAttention` keeps the scores of all heads, [b, heads, queries, keys], several times over, and
refuses additive biases and packed rows. PyTorch picks a kernel that keeps no scores where it has one for the device and
the inputs; sliding windows and attention sinks stay with Transformer Engine.

On CUDA, attention without a mask or a bias runs in FlashAttention, with one in the memory-efficient kernel; packed rows
run in FlashAttention, with biases in a kernel that PyTorch compiles (`relative_attention`). cuDNN's kernel is switched
off, for all of the process: it builds an execution plan for every new shape, which takes tens of milliseconds, and here
shapes change all the time.
"""

import contextlib
import math
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.models.kept_keys import KeptKeys
from megatron_dynapipe.megatron.models.packed_attention import (
    activate_flash_3,
    attend_by_sample,
    attend_in_kernel,
    attend_pieces_in_kernel,
    has_kernel,
    kernel_takes,
)
from megatron_dynapipe.megatron.models.packed_rows import PackedRow
from megatron_dynapipe.megatron.models.relative_attention import attend_with_biases, biases_take_kernel

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class SdpaCoreAttention(MegatronModule):
    """A drop-in for Megatron's local `DotProductAttention`: the same constructor, inputs and results.

    Differs from it in one case: a query for which every key is forbidden. Megatron gives it the mean of all values,
    here its result is undefined. The masks of `data.segments` have no such row.

    Args:
        config: the model's configuration.
        layer_number: not looked at: scaling by layer cancels out where the softmax is computed in fp32.
        attn_mask_type: causal attention hides later keys where no mask is given.
        attention_type: not looked at, as in Megatron.
        attention_dropout: probability of dropping a weight; the configuration's if None.
        softmax_scale: factor of the scores; 1 / √(head size) if None.
        k_channels, v_channels: not looked at: tensors have as many.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
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
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.kept_keys = KeptKeys()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [queries, b, heads, head size], of this tensor-parallel rank's heads.
            key: [keys, b, groups, head size]; every group serves heads / groups heads.
            value: likewise.
            attention_mask: broadcast to [b, heads, queries, keys]: bool, True where attention is forbidden; or numbers
                to be added to the scores, which are not copied if they are of the query's type.
            attn_mask_type: in place of the constructor's.
            attention_bias: broadcast to [b, heads, queries, keys]; added to the scaled scores.
            packed_seq_params: where the samples of a packed row lie; b is 1, or left out as in Megatron's format
                "thd". The mask is not looked at then, and a bias is that of the longest sample.

        Returns:
            [queries, b, heads × channels of a value].
        """
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        if query.is_cuda and not self.dropout:
            activate_flash_3(query.device)
        if packed_seq_params is not None:
            rows = [tensor.squeeze(1) if tensor.dim() == 4 else tensor for tensor in (query, key, value)]
            return self._attend_packed(rows[0], rows[1], rows[2], packed_seq_params, attention_bias, causal=causal)
        mask = attention_mask
        causal = causal and attention_mask is None
        if attention_bias is not None:
            if causal:
                mask = _later_keys(query.size(0), key.size(0), query.device)
            bias = attention_bias.to(query.dtype)
            mask = bias if mask is None else bias.masked_fill(mask, -math.inf)
        elif mask is not None:
            mask = ~mask if mask.dtype == torch.bool else mask.to(query.dtype)
        batch_first = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return self._attend(*batch_first, mask, causal=causal).transpose(0, 1).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """[b, queries, heads, channels] of tensors so; `mask` is what SDPA takes, and says more than `causal`."""
        heads_per_group = query.size(2) // key.size(2)
        if heads_per_group > 1 and mask is not None:  # the kernel for masks wants one group per head
            key, value = (tensor.repeat_interleave(heads_per_group, dim=2) for tensor in (key, value))
        with self._randomness():
            attended = scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal and mask is None,
                scale=self.softmax_scale,
                enable_gqa=heads_per_group > 1 and mask is None,
            )
        return attended.transpose(1, 2)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, bias: Tensor | None, *, causal: bool
    ) -> Tensor:
        """[t, 1, heads × head size] of a packed row [t, heads, head size]."""
        cut = row if isinstance(row, PackedRow) and row.cuts else None
        if cut is not None:
            key, value = self.kept_keys.keep(key, value, cut.starts(), cut.cuts)
        takes = partial(kernel_takes, query.dtype, query.size(2), on_cuda=has_kernel(query.device))
        alike = value.size(2) == query.size(2)  # which multi-latent attention's are not
        if alike and takes(dropout=self.training and self.dropout > 0, biased=bias is not None):
            if cut is not None and cut.has_prefix:  # without one keys would be copied as they are
                attended = attend_pieces_in_kernel(query, key, value, cut, self.kept_keys, self.attend_in_kernel)
            else:
                attended = self.attend_in_kernel(query, key, value, row, causal=causal)
        elif bias is not None and cut is None and self._biases_take_kernel(query, row):
            assert isinstance(row, PackedRow), "just looked at"
            attended = attend_with_biases(query, key, value, row, bias, causal=causal, scale=self.softmax_scale)
        else:
            if bias is not None and causal:
                bias = bias.masked_fill(_later_keys(bias.size(2), bias.size(3), bias.device), -math.inf)
            attend = partial(self._attend, causal=causal)
            scale = None if self.training and self.dropout else self.softmax_scale
            attended = attend_by_sample(
                query, key, value, row, attend, bias, causal=causal, kept=self.kept_keys, scale=scale
            )
        return attended.flatten(1)[:, None]

    def attend_in_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, *, causal: bool
    ) -> Tensor:
        """One kernel over all segments of a packed row: [t, heads, head size] of such."""
        return attend_in_kernel(query, key, value, row, causal=causal, scale=self.softmax_scale)

    def _biases_take_kernel(self, query: Tensor, row: PackedSeqParams) -> bool:
        has_positions = isinstance(row, PackedRow) and row.positions is not None
        return has_positions and biases_take_kernel(
            query.device, query.size(2), dropout=self.training and self.dropout > 0
        )

    def _randomness(self) -> contextlib.AbstractContextManager[object]:
        """Heads on different tensor-parallel ranks drop different weights, as in Megatron."""
        if not self.training or not self.dropout or self.config.sequence_parallel:
            return contextlib.nullcontext()
        tracker: contextlib.AbstractContextManager[object] = get_cuda_rng_tracker().fork()
        return tracker


def _later_keys(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool[1, 1, queries, keys]: True for keys after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)[None, None]
