"""How a layer's costs are divided: into attention and MLP, and how long its weight gradients take.

A layer costs a micro-batch what its tables say. Over samples of n own positions, each with k keys (of its earlier
pieces, too), that is divided in proportion to

    attention   Σ n · (linear + inner · k)          a decoder's, d positions over e of the encoder's output:
    MLP         Σ n · mlp                           attention   Σ d · (linear + inner · (d + e)) + e · memory

Profiles fit these rates to measurements under every recompute mode, of padded micro-batches and of packed rows.
Without them FLOPs are counted: h hidden, c heads × channels, f feed-forward give 8 h c, 4 c, 4 h f; a decoder
12 h c, 4 c, 4 h f, and 4 h c for memory.

Memory of the halves need not add up to the layer's. Recomputed in full each keeps its own input, so that each has its
own proportion of what the layer stores; their peaks are at different times, and are known in bytes or not at all.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec

from megatron_dynapipe.core.units import Recompute

LARGEST_RATE = 2**30
PEAK_UNIT = 64
"""Integers of `Peak` in a byte, but for `once`."""
WEIGHT_UNIT = 1024
"""Integers of `WeightTime` in a ns, but for the first."""
_Rate = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_RATE)]
_Once = Annotated[int, msgspec.Meta(ge=0, le=2**42)]
LayerKind = Literal["encoder", "decoder", "expert"]
"""The kind of a layer; a decoder-only model's are encoder layers, and expert layers where only some have experts."""
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)

_STORED = (13, 21)
"""Activations that attention keeps and that the MLP does, without attention's inside: of Megatron's layer, 11 s b h and
its dropout's mask and norm to 19 s b h and its norm (Korthikanti et al., 2022)."""


class Rates(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """In any unit: only their proportion counts. `linear` and `mlp` by position, `inner` by position and key, `memory`
    by position of the encoder's output."""

    linear: _Rate
    inner: _Rate
    mlp: _Rate
    memory: _Rate = 0


class Peak(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """High-water mark of half a layer: bytes that it takes once, such as a weight's gradient, and in bytes /
    `PEAK_UNIT` `linear` by position, `inner` by position and key, `memory` by position of the encoder's output."""

    once: _Once
    linear: _Once
    inner: _Once
    memory: _Once = 0


WeightTime = tuple[_Once, _Once, _Once]
"""Time of a layer's weight gradients: ns once, and in ns / `WEIGHT_UNIT` by position, and by position of the encoder's
output."""


AS_THE_LAYER = (Rates(1, 0, 0, 0), Rates(0, 0, 1, 0))
"""Each half stores all that the layer does."""


class Division(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The division of one kind of layer under one recompute mode.

    Attributes:
        forward, backward: of times.
        stored: of activations: by the first attention stores its part of what the layer does, by the second the MLP.
        peak: of attention, and of the MLP; neither is above the layer's, which counts for both where this is None.
        parameters: of attention and of the MLP, in any unit.
        weights: time of weight gradients; None where it was not measured: the forward time of attention's linears and
            MLP, which multiply as often.
    """

    forward: Rates
    backward: Rates
    stored: tuple[Rates, Rates]
    peak: tuple[Peak, Peak] | None = None
    parameters: tuple[_Rate, _Rate]
    weights: WeightTime | None = None

    def __post_init__(self) -> None:
        if not any(self.parameters):
            raise ValueError("expected parameters of attention or of the MLP above 0")


def shares_by_flops(
    hidden: int,
    channels: int,
    ffn: int,
    recompute: Recompute,
    *,
    key_value_channels: int | None = None,
    ffn_parameters: int | None = None,
    frozen: bool = False,
) -> Mapping[LayerKind, Division]:
    """The division of a layer that was not measured.

    Args:
        hidden: width of the model.
        channels: heads × channels of each.
        ffn: width of a feed-forward network of two matrices that multiplies as often.
        recompute: under full recomputation both halves store their own inputs.
        key_value_channels: query groups × channels of each; None for as many as `channels`.
        ffn_parameters: width of such a network that has as many parameters; None for `ffn`.
        frozen: whether weights get no gradients, so that of a backward's products attention's inside is twice the part.
    """
    c, g = channels, channels if key_value_channels is None else key_value_channels
    kept = Rates(_STORED[0], 0, _STORED[1])
    stored = AS_THE_LAYER if recompute is Recompute.FULL else (kept, kept)
    linear = 4 * hidden * (c + g)
    inner = 4 * c
    mlp = 4 * hidden * ffn
    encoder = smallest(linear, inner, mlp, 0)
    backward = smallest(linear, inner * (2 if frozen else 1), mlp, 0)
    decoder = smallest(4 * hidden * (2 * c + g), 4 * c, 4 * hidden * ffn, 4 * hidden * g)
    f = ffn if ffn_parameters is None else ffn_parameters
    return {
        "encoder": Division(forward=encoder, backward=backward, stored=stored, parameters=(c + g, f)),
        "decoder": Division(forward=decoder, backward=decoder, stored=stored, parameters=(2 * (c + g), f)),
    }


def smallest(*rates: int) -> Rates:
    """Rates of this proportion."""
    common = math.gcd(*rates)
    return Rates(*(rate // common for rate in rates))
