"""Core attention that keeps the samples of a packed row apart, and attends to earlier pieces or chunks of a sample.

    row     a a a a b b c c c      one call of the module's own attention for each sample, or one kernel for all
    piece   b' attends to the keys and values that b's pass has left here (`kept_keys`), and to its own
    share   its two chunks attend to keys and values of all members of a team (`shared_keys`)

Sinks, windows, soft caps, scales and dropout are the module's, since it is the module that attends. Padded rows
go its own way, bit for bit.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.equip.subclass import become
from megatron_dynapipe.megatron.equip.told import Channel
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.engine_attention import has_fused_kernel
from megatron_dynapipe.megatron.models.kept_keys import KeptKeys
from megatron_dynapipe.megatron.models.packed_attention import attend_pieces_in_kernel
from megatron_dynapipe.megatron.models.packed_rows import PackedRow
from megatron_dynapipe.megatron.models.shared_keys import TeamKeys

Attend = Callable[..., Tensor]
"""The module's own forward function."""
HALF = 2
"""Bytes of an element for which Transformer Engine has kernels over packed rows."""


class RowsCore:
    """Any core attention, one call for each sample of a packed row.

    Attributes:
        channel: tells the row.
        kept_keys: keys of pieces whose later pieces are to come.
    """

    channel: Channel
    kept_keys: KeptKeys

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: object, **keywords: object) -> Any:
        """As the module's own; a packed row is [t, 1, heads, channels], or what it was given as `packed_seq_params`."""
        attend: Attend = super().forward  # type: ignore[misc]
        given = keywords.get("packed_seq_params")
        row = given if isinstance(given, PackedRow) else self.channel.told.row
        if row is None:
            return attend(query, key, value, *rest, **keywords)
        keywords.pop("packed_seq_params", None)
        if row.ranks > 1:
            return self._attend_shares(attend, query, key, value, row, **keywords)
        return self.attend_row(attend, query, key, value, row, **keywords)

    def _attend_shares(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, **keywords: object
    ) -> Tensor:
        """[s, b, heads × channels] of b rows of s positions, which attention takes one after another."""
        length, size = query.shape[:2]
        team = TeamKeys(self.channel.teams, row, key, value)
        in_one_row = query.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        with team.gathered_again():
            keys, values = (tensor.unsqueeze(1) for tensor in team.joined)
            attended = self.attend_row(attend, in_one_row, keys, values, row, **keywords)
        return attended.view(size, length, -1).transpose(0, 1).contiguous()

    def attend_row(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, **keywords: Any
    ) -> Tensor:
        """[t, 1, heads × channels] of a row; keys and values are kept as [t, heads, channels], in a kernel or not."""
        if row.cuts:
            kept = self.kept_keys.keep(key.squeeze(1), value.squeeze(1), row.starts(), row.cuts)
            key, value = (tensor.unsqueeze(1) for tensor in kept)
        queries = query.split(row.lengths_q)
        keys = key.split(row.lengths_kv)
        values = value.split(row.lengths_kv)
        parts = []
        for segment, its in enumerate(queries):
            if len(its):
                joined = self._with_earlier(segment, keys[segment], values[segment], row)
                parts.append(self.attend_segment(attend, its, *joined, **keywords))
        return torch.cat(parts)

    def _with_earlier(self, segment: int, key: Tensor, value: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
        cut = row.cuts.get(segment)
        if cut is None or not cut.start:
            return key, value
        pieces = [piece.read() for piece in self.kept_keys.before(cut)]
        keys, values = (torch.cat(tensors).unsqueeze(1) for tensors in zip(*pieces, strict=True))
        return torch.cat([keys, key]), torch.cat([values, value])

    def attend_segment(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        """Attention with an explicit mask, which a window's own joins; causal, the last query sees all keys."""
        hidden = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
        later = 1 + len(key) - len(query) if _is_causal(keywords) else len(key)
        return attend(query, key, value, hidden.triu(later)[None, None], **keywords)


class EngineRowsCore(RowsCore):
    """Transformer Engine's: one call in its format "thd" where that has a fused kernel, else one a sample.

    Without a kernel it would compute all scores of the row, in fp32 nothing.

    Attributes:
        config: the layer's.
        window_size: this layer's own window, which some models have in every other layer.
    """

    config: TransformerConfig

    def has_kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: str) -> bool:
        """Whether there is one for rows of heads like these [t, 1, heads, channels]; says once where there is none."""
        if query.element_size() != HALF:
            return False
        special: dict[str, Any] = {}
        if value.size(-1) != query.size(-1):
            special["head_dim_v"] = value.size(-1)
        if (window := getattr(self, "window_size", None)) not in (None, (-1, 0), (-1, -1)):
            special["window_size"] = tuple(window)
        if self.config.softmax_type != "vanilla":
            special["softmax_type"] = self.config.softmax_type
        sizes = query.size(-2), key.size(-2), query.size(-1)
        return has_fused_kernel(*sizes, query.dtype, mask, instead="samples are attended to one by one", **special)

    def attend_row(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, **keywords: object
    ) -> Tensor:
        """Does what `RowsCore` does."""
        if not self.has_kernel(query, key, value, _mask_name(row, keywords)):
            return super().attend_row(attend, query, key, value, row, **keywords)
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        if row.cuts:
            key, value = self.kept_keys.keep(key, value, row.starts(), row.cuts)

        def in_kernel(query: Tensor, key: Tensor, value: Tensor, row: PackedRow, **_: object) -> Tensor:
            return attend(query, key, value, None, **keywords | _in_thd(row, keywords))

        if row.cuts and row.has_prefix:
            return attend_pieces_in_kernel(query, key, value, row, self.kept_keys, in_kernel).view(len(query), 1, -1)
        return in_kernel(query, key, value, row).view(len(query), 1, -1)

    def attend_segment(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        """By the mask's name, which hides from the bottom right where there are earlier keys."""
        if len(query) != len(key) and _is_causal(keywords):
            keywords |= {"attn_mask_type": AttnMaskType.causal_bottom_right}
        return attend(query, key, value, None, **keywords)


def _is_causal(keywords: dict[str, Any]) -> bool:
    return keywords.get("attn_mask_type") not in (AttnMaskType.no_mask, AttnMaskType.padding)


def _in_thd(row: PackedRow, keywords: dict[str, object]) -> dict[str, object]:
    """A row in Transformer Engine's format, and its mask: of pieces from the bottom right.

    Megatron's enumeration has no such mask for this format; its layer hands on the name alone.
    """
    row_in_thd = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=row.cu_seqlens_q,
        cu_seqlens_kv=row.cu_seqlens_kv,
        max_seqlen_q=row.max_seqlen_q,
        max_seqlen_kv=row.max_seqlen_kv,
    )
    mask = types.SimpleNamespace(name=_mask_name(row, keywords))
    return {"packed_seq_params": row_in_thd, "attn_mask_type": mask}


def _mask_name(row: PackedRow, keywords: dict[str, object]) -> str:
    return "padding" + "_causal" * _is_causal(keywords) + "_bottom_right" * row.has_prefix


class SdpaRowsCore(RowsCore):
    """Over PyTorch's attention, which knows packed rows: this project's own, and in place of Megatron's vanilla one.

    Attributes:
        aside: attends to packed rows in place of the module; no part of the model, and without parameters.
    """

    aside: SdpaCoreAttention | None
    training: bool

    def attend_row(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, **keywords: object
    ) -> Tensor:
        """Does what `RowsCore` does."""
        if self.aside is not None:
            attend = self.aside.train(self.training)
        return attend(query, key, value, None, packed_seq_params=row, **keywords)


def equip_attention(chunks: Sequence[nn.Module], channel: Channel) -> list[object]:
    """Have every core attention of model chunks take packed rows and pieces; the modules."""
    cores = list(cores_of(chunks))
    for core, attention in cores:
        if isinstance(core, RowsCore):
            vars(core)["channel"] = channel
        elif _is_engine(core):
            become(core, EngineRowsCore, channel=channel, kept_keys=KeptKeys())
        elif isinstance(core, SdpaCoreAttention):
            become(core, SdpaRowsCore, channel=channel, aside=None)
        elif (aside := _aside(core, attention)) is not None:
            become(core, SdpaRowsCore, channel=channel, kept_keys=aside.kept_keys, aside=aside)
        else:
            become(core, RowsCore, channel=channel, kept_keys=KeptKeys())
    return [core for core, _ in cores]


def mark_sinks(chunks: list[nn.Module]) -> list[nn.Module]:
    """Say of built chunks that attention sinks, one for each head, are divided over tensor-parallel ranks.

    Megatron 0.19 does not, so that the gradient's norm would count the first rank's alone.
    """
    for name, parameter in (each for chunk in chunks for each in chunk.named_parameters()):
        if name.endswith("core_attention.softmax_offset"):  # Bridge has set defaults, over which Megatron sets nothing
            vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return chunks


def has_engine_attention(chunks: Sequence[nn.Module]) -> bool:
    """Whether core attention is Transformer Engine's, as Megatron builds it."""
    return any(_is_engine(core) for core, _ in cores_of(chunks))


def _is_engine(core: Any) -> bool:
    return any(kind.__name__ == "TEDotProductAttention" for kind in type(core).__mro__)


def cores_of(chunks: Sequence[nn.Module]) -> Iterator[tuple[Any, Attention]]:
    """Every core attention of model chunks, and the attention that it is a part of."""
    for attention in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(attention, Attention) and attention.core_attention is not None:
            yield attention.core_attention, attention


def _aside(core: Any, attention: Attention) -> SdpaCoreAttention | None:
    """Attention over PyTorch's kernels that computes what a core does; None where only the core itself can."""
    if type(core) is not DotProductAttention or getattr(core.config, "multi_latent_attention", False):
        return None
    try:
        return SdpaCoreAttention(
            core.config,
            attention.layer_number,
            attention.attn_mask_type,
            attention.attention_type,
            core.attention_dropout.p,
            core.softmax_scale,
        )
    except ConfigError:  # windows, sinks
        return None
