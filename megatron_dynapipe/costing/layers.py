"""A model's stacks of modules from what flags and files say: a family, numbers of layers, a pattern."""

from collections.abc import Collection, Sequence

from megatron_dynapipe.core.costs import ATTENTION, DECODER_ATTENTION, DECODER_MLP, EXPERT_MLP, MLP
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import Model
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.pattern import kinds_of_pattern


def family_of_flags(names: Collection[str]) -> ModelFamily:
    """The family of a model that Megatron's flags describe, from their names without dashes."""
    return ModelFamily.GPT if {"encoder-num-layers", "decoder-num-layers"}.isdisjoint(names) else ModelFamily.T5


def model_of_layers(
    family: ModelFamily,
    encoder_layers: int,
    decoder_layers: int = 0,
    *,
    expert_layers: Sequence[int] = (),
    pattern: str = "",
) -> Model:
    """The model that flags or a file describe.

    Args:
        family: all layers of a decoder-only one count as encoder layers.
        encoder_layers: layers of the first stack.
        decoder_layers: layers of the second.
        expert_layers: layers of a decoder-only model that have experts, if others have none.
        pattern: of a HybridModel, whose modules are its layers; empty for others.

    Raises:
        ConfigError: the family has no such layers, or the pattern has a symbol that is not known.
    """
    if pattern:
        return Model(encoder=kinds_of_pattern(pattern), modules_per_layer=1)
    if encoder_layers < 1 or (decoder_layers < 1) == family.is_encoder_decoder:
        raise ConfigError(
            f"expected a {family} model with layers of its kinds, got {encoder_layers} encoder and"
            f" {decoder_layers} decoder layers"
        )
    encoder = [ATTENTION, MLP] * encoder_layers
    for layer in expert_layers:
        encoder[2 * layer + 1] = EXPERT_MLP
    return Model(encoder=tuple(encoder), decoder=(DECODER_ATTENTION, DECODER_MLP) * decoder_layers)
