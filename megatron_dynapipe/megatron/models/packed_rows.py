"""Packed rows in the form in which attention takes them.

For Megatron's layers a packed row is one sequence of batch size 1, in its format of padded rows: in its format "thd"
the unfused rotary embedding reads offsets on the host in every layer, which waits for the device each time, and a
piece's rotations would begin anew. Core attention alone keeps samples apart (`equip.attention`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dynapipe.core.units import LENGTH_MULTIPLE, round_up
from megatron_dynapipe.data.segments import CutSegment, RowSegments
from megatron_dynapipe.megatron.models.padded_rows import PADDED_FORMAT, AttentionRows
from megatron_dynapipe.megatron.models.segment_groups import SegmentGroup, group_segments


@dataclass(eq=False)
class PackedRow(AttentionRows):
    """One packed row on the device: what attention takes, and what is known of it on the host.

    Attributes:
        lengths_q, lengths_kv: positions of every segment of queries and of keys; some may be 0. Keys of earlier pieces
            are not among them, but counted by Megatron's own attributes; of shares all keys are.
        cuts: the segments that are pieces of samples.
        ranks: members of the team that has the row in shares; 1 for a whole one.
        key_places: of shares, int64[keys], where each key is among the keys of all members.
        kept: what attention makes of the row once for all layers.
    """

    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    cuts: Mapping[int, CutSegment] = field(default_factory=dict)
    ranks: int = 1
    key_places: Tensor | None = None
    kept: dict[str, object] = field(default_factory=dict)
    _groups: tuple[Sequence[SegmentGroup], Tensor] | None = None
    _picked: Tensor | None = None
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def segment_groups(self, device: torch.device) -> tuple[Sequence[SegmentGroup], Tensor]:
        """The row's segments in groups of like lengths, made once for all layers."""
        if self._groups is None:
            apart = {segment for segment in range(len(self.lengths_q)) if self.before(segment)}
            self._groups = group_segments(self.lengths_q, self.lengths_kv, device, apart)
        return self._groups

    def before(self, segment: int) -> int:
        """Keys of earlier pieces or chunks, to which a segment attends in addition to its own; it is causal then."""
        if self.ranks > 1:
            return self.lengths_kv[segment] - self.lengths_q[segment]
        return self.cuts[segment].start if segment in self.cuts else 0

    @property
    def has_prefix(self) -> bool:
        """Whether a segment attends to keys before its own."""
        return self.ranks > 1 or any(cut.start for cut in self.cuts.values())

    def starts(self) -> list[int]:
        """The places at which the segments begin and the last one ends."""
        return [0, *accumulate(self.lengths_q)]

    def later_keys(self, segment: int, like: Tensor) -> Tensor:
        """The mask that SDPA adds to the scores of a piece: [1, 1, queries, keys].

        On a GPU, where the kernel keeps it for the backward pass, it is made once for all layers. On a CPU nothing
        keeps it: a row that did would hold as much as the scores of one head, which plans do not count.
        """
        if segment in self._masks:
            return self._masks[segment]
        queries = self.lengths_q[segment]
        before = self.before(segment)
        hidden = torch.full((queries, before + queries), -math.inf, dtype=like.dtype, device=like.device)
        mask = hidden.triu_(before + 1)[None, None]
        if like.is_cuda:
            self._masks[segment] = mask
        return mask

    def pick(self, rotations: Tensor) -> Tensor:
        """Rotations [t, 1, 1, channels] of every position of the row, picked from the first positions'.

        There are as many as positions where they have been picked before, or there is one sample alone.
        """
        assert self.positions is not None, "a row of queries has positions"
        if self.cuts or self.ranks > 1:  # their rotations may be more than there are positions, and as many by chance
            if rotations is not self._picked:
                self._picked = rotations[self.positions[0]]
            return self._picked
        if rotations.size(0) >= self.positions.size(1):
            return rotations
        return rotations[self.positions[0]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceSegments:
    """The segments of one row, with offsets int32[segments + 1] and positions int64[1, t] on the device."""

    host: RowSegments
    offsets: Tensor
    positions: Tensor
    key_offsets: Tensor | None = None
    key_places: Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        cuts: Mapping[int, CutSegment] | None = None,
        *,
        multiple: int = LENGTH_MULTIPLE,
    ) -> "DeviceSegments":
        """The segments of samples of these positions, which may be pieces, and of the row's tail."""
        starts = tuple(accumulate(lengths, initial=0))
        host = RowSegments.of(starts, round_up(starts[-1], multiple), cuts)
        return cls(
            host=host,
            offsets=host.offsets.to(device),
            positions=host.positions.to(device),
            key_offsets=None if host.key_offsets is None else host.key_offsets.to(device),
        )


def self_row(segments: DeviceSegments, cross: PackedRow | None = None) -> PackedRow:
    """The arguments of self-attention over a row."""
    return attention_row(segments, segments, cross)


def attention_row(queries: DeviceSegments, keys: DeviceSegments, cross: PackedRow | None = None) -> PackedRow:
    """The arguments of attention of one row's segments to another's, segment i to segment i.

    The tail of the queries' row joins the last sample where the keys' row has no tail. Queries without keys come out of
    FlashAttention as zeros, but of cuDNN before 9.25 as NaN, which no mask of the loss takes out again
    (cudnn-frontend #943, #944). Nothing looks at what a tail makes.
    """
    lengths_q = queries.host.lengths
    lengths_kv = keys.host.lengths
    if keys.host.ranks > 1 and keys.host.key_offsets is not None:
        lengths_kv = tuple(keys.host.key_offsets.diff().tolist())
    offsets_q = queries.offsets
    offsets_kv = keys.offsets if keys.key_offsets is None else keys.key_offsets
    if lengths_q[-1] and not lengths_kv[-1]:
        lengths_q = (*lengths_q[:-2], sum(lengths_q[-2:]))
        lengths_kv = lengths_kv[:-1]
        offsets_q = torch.cat([offsets_q[:-2], offsets_q[-1:]])
        offsets_kv = offsets_kv[:-1]
    return PackedRow(
        qkv_format=PADDED_FORMAT,
        cu_seqlens_q=offsets_q,
        cu_seqlens_kv=offsets_kv,
        max_seqlen_q=max(lengths_q),
        max_seqlen_kv=keys.host.most_keys,
        lengths_q=lengths_q,
        lengths_kv=lengths_kv,
        cuts=queries.host.cuts,
        ranks=keys.host.ranks,
        key_places=keys.key_places,
        positions=queries.positions,
        cross=cross,
    )


class CrossRows:
    """Hands a decoder layer's rows on to its cross-attention: Megatron's layer gives them to self-attention alone.

    In a recomputation the layer is called with its row again, so that nothing is kept between passes.

    Args:
        layer: Megatron's `TransformerLayer` with a cross-attention.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._row: AttentionRows | None = None
        layer.register_forward_pre_hook(self._take, with_kwargs=True)
        attention: Any = layer.cross_attention
        attention.register_forward_pre_hook(self._give, with_kwargs=True)

    def _take(self, _layer: nn.Module, _arguments: object, keywords: Mapping[str, object]) -> None:
        row = keywords.get("packed_seq_params")
        self._row = row.cross if isinstance(row, AttentionRows) else None

    def _give(self, _attention: nn.Module, arguments: Any, keywords: Mapping[str, Any]) -> Any:
        row = self._row
        self._row = None
        return arguments, {**keywords, "packed_seq_params": row}
