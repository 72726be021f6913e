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

from megatron_dynapipe.core.costs import Division, LayerKind, Rates
from megatron_dynapipe.core.units import Recompute

_STORED = (13, 21)
"""Activations that attention keeps and that the MLP does, without attention's inside: of Megatron's layer, 11 s b h and
its dropout's mask and norm to 19 s b h and its norm (Korthikanti et al., 2022)."""


AS_THE_LAYER = (Rates(1, 0, 0, 0), Rates(0, 0, 1, 0))
"""Each half stores all that the layer does."""


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
