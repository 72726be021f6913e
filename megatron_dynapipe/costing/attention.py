"""What attention may have in addition to heads and query groups: compressed queries, keys and values, sliding windows.

multi-latent attention   x ─► q_rank ─► queries                      queries and keys: channels + rotary of each head
                         x ─► rank + rotary ─► keys and values       values: channels of their own

sliding window           a position attends to itself and to those just before it, in some layers or in all
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.costing.pattern import evaluated

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]
_RANKS = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Megatron's defaults."""


class Latent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-latent attention (DeepSeek-V2, 2024): every tensor-parallel rank has all of the compressions.

    Attributes:
        query_rank: width that queries are compressed to; 0 where they are not.
        rank: width of compressed keys and values.
        channels: of a head's queries and keys without rotations; `rotary`: with them, which all heads' keys share.
        value_channels: of a head's values.
        normed: whether what is compressed is normed.
    """

    query_rank: _AtLeastZero
    rank: _AtLeastOne
    channels: _AtLeastOne
    rotary: _AtLeastZero
    value_channels: _AtLeastOne
    normed: bool = True

    @classmethod
    def of_megatron(cls, args: Mapping[str, Any]) -> "Latent | None":
        """That of Megatron's arguments; None of other attention."""
        if not args.get("multi_latent_attention"):
            return None
        query_rank, *others = (args.get(name, default) for name, default in _RANKS.items())
        rank, channels, rotary, value_channels = others
        return cls(
            query_rank=query_rank or 0,
            rank=rank,
            channels=channels,
            rotary=rotary,
            value_channels=value_channels,
            normed=bool(args.get("qk_layernorm")),
        )

    @property
    def key_channels(self) -> int:
        """Channels of a head's queries, and of its keys."""
        return self.channels + self.rotary

    def compressing(self, hidden: int) -> int:
        """Weights of the compressions, which every tensor-parallel rank has."""
        return hidden * (self.query_rank + self.rank + self.rotary)

    def expanding(self, hidden: int, heads: int) -> int:
        """Weights that make queries, keys and values of all heads."""
        return heads * (
            (self.query_rank or hidden) * self.key_channels + self.rank * (self.channels + self.value_channels)
        )


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers whose positions attend to the latest ones alone; costs of a layer are the mean of all layers'.

    Attributes:
        keys: that a position attends to, its own included.
        layers: that do so, `among` so many.
    """

    keys: _AtLeastOne
    layers: _AtLeastOne
    among: _AtLeastOne

    @classmethod
    def of_megatron(cls, args: Mapping[str, Any]) -> "Window | None":
        """That of Megatron's arguments; None where no layer has one.

        Every n-th layer has none where `window_attn_skip_freq` is n; a list says of each layer whether it has.
        """
        size, layers = args.get("window_size"), args.get("num_layers") or 1
        if not size:
            return None
        keys = size if isinstance(size, int) else int(str(size).strip("([ ").split(",")[0]) + 1
        skipped = args.get("window_attn_skip_freq")
        skipped = evaluated(skipped) if isinstance(skipped, str) else skipped
        if skipped is None:
            have = layers
        elif isinstance(skipped, int):
            have = layers - layers // skipped
        else:
            have = sum(map(bool, skipped[:layers]))
        return cls(keys=keys, layers=have, among=layers) if have and keys > 0 else None

    def seen(self, positions: Floats) -> Floats:
        """Keys of a position of a sample, in the mean over layers: as many as positions, less those out of sight."""
        out_of_sight = np.maximum(positions - self.keys, 0) ** 2 / positions
        return np.asarray(positions - out_of_sight * (self.layers / self.among))
