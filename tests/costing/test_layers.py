"""The stacks of modules of a model that flags and files describe in layers."""

import pytest

from megatron_dynapipe.core.costs import ATTENTION, DECODER_ATTENTION, DECODER_MLP, EXPERT_MLP, HEAD, MLP
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import model_of_layers

GPT = ModelFamily.GPT
T5 = ModelFamily.T5


@pytest.mark.parametrize(("family", "layers"), [(GPT, (4, 1)), (GPT, (0,)), (T5, (4, 0)), (T5, (0, 4))])
def test_a_model_has_the_layers_of_its_family(family: ModelFamily, layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"expected a {family} model with layers of its kinds, got {layers[0]}"):
        model_of_layers(family, *layers)


def test_a_layer_is_two_modules() -> None:
    model = model_of_layers(T5, 1, 2)
    assert model.modules == (ATTENTION, MLP, *(DECODER_ATTENTION, DECODER_MLP) * 2, HEAD)
    assert (model.family, model.layers, model.layers_divide) == (T5, 3, True)


def test_layers_with_experts_are_modules_of_a_kind_of_their_own() -> None:
    model = model_of_layers(GPT, 3, expert_layers=(1,))
    assert model.modules == (ATTENTION, MLP, ATTENTION, EXPERT_MLP, ATTENTION, MLP, HEAD)
    assert model.layers_with_experts == [1]


def test_a_layer_of_a_pattern_is_one_module() -> None:
    model = model_of_layers(GPT, 4, expert_layers=(3,), pattern="*-*E")
    assert model.modules == (ATTENTION, MLP, ATTENTION, EXPERT_MLP, HEAD)
    assert (model.family, model.layers, model.layers_divide) == (GPT, 4, False)
    assert model.layers_with_experts == [3]
