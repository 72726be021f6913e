import pytest

from megatron_dynapipe.cost import PipelineLayout
from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.boundary import BoundarySettings, BoundaryTensor, boundary_tensors
from megatron_dynapipe.units import ModelFamily, Shape

E, D = BoundaryTensor.ENCODER, BoundaryTensor.DECODER


@pytest.mark.parametrize(
    ("layers", "encoder_layers", "expected"),
    [
        ((4, 4), 4, ((E,),)),  # the encoder ends with stage 0
        ((2, 2, 2, 2), 4, ((E,), (E,), (E, D))),
        ((3, 3, 2), 4, ((E,), (E, D))),  # stage 1 holds the last encoder and the first decoder layers
        ((5, 3), 4, ((E, D),)),
        ((8,), 4, ()),
    ],
)
def test_t5_passes_the_decoders_state_once_it_has_begun(layers, encoder_layers, expected):
    decoder_layers = sum(layers) - encoder_layers
    layout = PipelineLayout(
        family=ModelFamily.T5,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        layers_per_stage=layers,
    )
    assert boundary_tensors(layout) == expected


def test_gpt_passes_one_tensor():
    layout = PipelineLayout(family=ModelFamily.GPT, encoder_layers=8, layers_per_stage=(2, 3, 3))
    assert boundary_tensors(layout) == ((E,), (E,))


def test_shapes():
    settings = BoundarySettings(tensors=((E,), (E, D)), hidden_size=128)
    assert settings.shapes([Shape(3, 64, 16)]) == ((((64, 3, 128),), ((64, 3, 128), (16, 3, 128))),)
    divided = BoundarySettings(tensors=((E,), (E, D)), hidden_size=128, sequence_parallel=4)
    assert divided.shapes([Shape(3, 64, 16)]) == ((((16, 3, 128),), ((16, 3, 128), (4, 3, 128))),)


def test_refusals():
    with pytest.raises(PlanningError, match="expected a hidden size and a sequence-parallel size of at least 1"):
        BoundarySettings(tensors=(), hidden_size=0)
    settings = BoundarySettings(tensors=((E,),), hidden_size=128, sequence_parallel=3)
    with pytest.raises(PlanningError, match="expected the lengths of shape 3x64 to be divisible by the sequence-par"):
        settings.shapes([Shape(3, 64)])
