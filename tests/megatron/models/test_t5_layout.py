import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.model import BoundaryTensor, PipelineLayout, boundary_tensors
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import model_of_layers, stage_modules
from megatron_dynapipe.megatron.models.t5_stage import embedding_ranks, sharings
from tests.helpers.t5_models import t5_layout

# encoder layers, decoder layers, split → (encoder, decoder) layers of each stage, stages with word embeddings,
# stages with position embeddings
TABLE = {
    "one stage": (2, 2, [4], ["01|01"], [0], [0]),
    "two stages": (2, 2, [2, 2], ["01|", "|01"], [0, 1], [0, 1]),
    "four stages": (2, 2, [1, 1, 1, 1], ["0|", "1|", "|0", "|1"], [0, 2, 3], [0, 2]),
    "boundary inside a stage": (3, 3, [2, 2, 2], ["01|", "2|0", "|12"], [0, 1, 2], [0, 1]),
    "both stacks start on the first stage": (1, 4, [3, 2], ["0|01", "|23"], [0, 1], [0]),
    "deeper encoder, uneven": (4, 1, [3, 1, 1], ["012|", "3|", "|0"], [0, 2], [0, 2]),
}


@pytest.mark.parametrize(
    ("encoder", "decoder", "split", "layers", "words", "positions"), TABLE.values(), ids=TABLE.keys()
)
def test_splits(encoder, decoder, split, layers, words, positions):
    layout = t5_layout(encoder, decoder, len(split), split)
    stages = stage_modules(layout)
    drawn = ["|".join("".join(map(str, whole(stack))) for stack in (stage.encoder, stage.decoder)) for stage in stages]
    assert drawn == layers
    assert holders(layout) == [words, positions]
    assert holders(layout, tied=False) == [positions, positions]
    encoder_stages = [stage for stage, name in enumerate(layers) if name[0] != "|"]
    decoder_stages = [stage for stage, name in enumerate(layers) if name[-1] != "|"]
    assert holders(layout, kind="relative") == [words, encoder_stages, decoder_stages]


def whole(modules: range) -> range:
    """The layers of modules, none of which is cut."""
    return range(modules.start // 2, modules.stop // 2)


def holders(layout: PipelineLayout, kind: str = "learned_absolute", *, tied: bool = True) -> list[list[int]]:
    """The stages with a copy of each shared weight."""
    return [list(weight.stages) for weight in sharings(layout, kind, tied=tied)]


def test_virtual_stages_go_round_the_ranks():
    layout = t5_layout(4, 4, 2, chunks=2)
    assert layout.stages == 2 and holders(layout)[0] == [0, 2, 3]
    assert stage_modules(layout) == stage_modules(t5_layout(4, 4, 4))


def test_megatron_is_told_of_one_holder_of_embeddings():
    assert embedding_ranks([3, 7]) == [3]


@st.composite
def splits(draw):
    split = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6).filter(lambda layers: sum(layers) > 1))
    return draw(st.integers(1, sum(split) - 1)), split


@given(splits())
def test_every_layer_lies_on_one_stage_and_the_planner_agrees(case):
    encoder, split = case
    decoder = sum(split) - encoder
    stages = stage_modules(t5_layout(encoder, decoder, len(split), split))
    assert [i for stage in stages for i in stage.encoder] == list(range(2 * encoder))
    assert [i for stage in stages for i in stage.decoder] == list(range(2 * decoder))
    for happens_once in ("starts_encoder", "ends_encoder", "starts_decoder", "ends_decoder"):
        assert sum(getattr(stage, happens_once) for stage in stages) == 1
    layout = PipelineLayout.of_layers(model_of_layers(ModelFamily.T5, encoder, decoder), tuple(split))
    counts = layout.counts(tuple(dict.fromkeys(layout.modules)))
    assert counts[:, 1].tolist() == [len(stage.encoder) // 2 for stage in stages]
    crossing = boundary_tensors(layout)
    both = (BoundaryTensor.ENCODER, BoundaryTensor.DECODER)
    assert crossing == tuple(both if stage.decoder else both[:1] for stage in stages[:-1])
