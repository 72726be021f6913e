"""How the layers of a model that was not measured are divided, from the numbers of the model."""

from collections.abc import Mapping

import msgspec
import numpy as np

from megatron_dynapipe.core.costs import Division, LayerKind, Rates
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing.division import shares_by_flops, smallest
from megatron_dynapipe.costing.shape import ModelShape
from megatron_dynapipe.costing.work import LayerWork


def divisions_of(shape: ModelShape, recompute: Recompute) -> Mapping[LayerKind, Division]:
    """The division of each kind of layer that a model has."""
    if shape.kinds > 1:
        return {
            "encoder": _of_layers(shape.dense, recompute)["encoder"],
            "expert": _of_layers(shape, recompute)["encoder"],
        }
    divisions = _of_layers(shape, recompute)
    return divisions if shape.family.is_encoder_decoder else {"encoder": divisions["encoder"]}


def _of_layers(shape: ModelShape, recompute: Recompute) -> Mapping[LayerKind, Division]:
    """How like layers are divided: by published shares, but with experts or latent attention by both halves' work."""
    divisions = shares_by_flops(
        shape.hidden,
        shape.query_channels,
        shape.mlp_width,
        recompute,
        key_value_channels=shape.key_value_channels,
        ffn_parameters=shape.mlp_parameters(1) // (2 * shape.hidden),
        frozen=shape.adapters is not None,
    )
    if shape.experts is None and shape.latent is None:
        return divisions
    division, one = divisions["encoder"], np.ones(())
    work = LayerWork(shape=shape, element_bytes=1)
    attention, mlp = work.self_attention(one, one), work.feed_forward(one, one)
    if recompute is not Recompute.FULL:
        kept = Rates(int(attention.kept_bytes), 0, int(mlp.kept_bytes))
        division = msgspec.structs.replace(division, stored=(kept, kept))
    if shape.latent is not None:
        linear, inner = int(attention.linear_flops), int(attention.core_flops)
        network = int(mlp.linear_flops)
        division = msgspec.structs.replace(
            division,
            forward=smallest(linear, inner, network, 0),
            backward=smallest(linear, inner * (1 if shape.adapters is None else 2), network, 0),
            parameters=(shape.attention_parameters(1) // (2 * shape.hidden), division.parameters[1]),
        )
    return {"encoder": division}
