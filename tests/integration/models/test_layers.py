import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.cost.layout import PipelineLayout
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.planning.boundary import BoundaryTensor, boundary_tensors
from megatron_dynapipe.units import ModelFamily

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
    cut = T5Split.of(encoder, decoder, len(split), split)
    drawn = ["|".join("".join(map(str, stack)) for stack in (stage.encoder, stage.decoder)) for stage in cut.stages]
    assert drawn == layers
    assert list(cut.word_embedding_stages) == words
    assert list(cut.embedding_stages) == positions
    assert cut.layout.layers_per_stage == tuple(split)
    assert list(cut.encoder_stages) == [i for i, name in enumerate(layers) if name[0] != "|"]
    assert list(cut.decoder_stages) == [i for i, name in enumerate(layers) if name[-1] != "|"]


def test_virtual_stages_go_round_the_ranks():
    cut = T5Split.of(4, 4, 2, chunks=2)
    assert cut == T5Split.of(4, 4, 2, [2, 2, 2, 2], chunks=2)
    assert cut.ranks == 2
    assert cut.of_rank(0) == (cut.stages[0], cut.stages[2]) and cut.of_rank(1) == (cut.stages[1], cut.stages[3])
    assert cut.stages == T5Split.of(4, 4, 4).stages
    assert cut.word_embedding_stages == (0, 2, 3)


def test_megatron_is_told_of_one_holder_of_embeddings():
    cut = T5Split.of(2, 2, 2, chunks=2)
    assert cut.embedding_ranks([3, 7]) == [3]


def test_an_equal_split_is_the_default():
    assert T5Split.of(4, 2, 3) == T5Split.of(4, 2, 3, [2, 2, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 3, 2), "7 layers cannot be split equally over 2 stages"),
        ((0, 3, 1), "expected a t5 model with layers of its kinds, got 0 encoder and 3 decoder layers"),
        ((2, 2, 2, [4]), r"expected a layer split over 2 stages, got \[4\]"),
        ((2, 2, 2, [4, 0]), r"at least 0.5 on every stage, got \[4, 0\]"),
        ((2, 2, 2, [2, 3]), r"a layer split of 4 layers .* got \[2, 3\]"),
    ],
)
def test_splits_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        T5Split.of(*arguments)


def test_a_pipeline_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="expected 2 pipeline ranks, got 3"):
        T5Split.of(2, 2, 2).embedding_ranks([0, 1, 2])


@st.composite
def splits(draw):
    split = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6).filter(lambda layers: sum(layers) > 1))
    return draw(st.integers(1, sum(split) - 1)), split


@given(splits())
def test_every_layer_lies_on_one_stage_and_the_planner_agrees(case):
    encoder, split = case
    decoder = sum(split) - encoder
    stages = T5Split.of(encoder, decoder, len(split), split).stages
    assert [i for stage in stages for i in stage.encoder] == list(range(encoder))
    assert [i for stage in stages for i in stage.decoder] == list(range(decoder))
    for happens_once in ("starts_encoder", "ends_encoder", "starts_decoder", "ends_decoder"):
        assert sum(getattr(stage, happens_once) for stage in stages) == 1
    layout = PipelineLayout(
        family=ModelFamily.T5, encoder_layers=encoder, decoder_layers=decoder, layers_per_stage=tuple(split)
    )
    counts = layout.counts(tuple(dict.fromkeys(layout.modules)))
    assert counts[:, 1].tolist() == [len(stage.encoder) for stage in stages]
    crossing = boundary_tensors(layout)
    both = (BoundaryTensor.ENCODER, BoundaryTensor.DECODER)
    assert crossing == tuple(both if stage.decoder else both[:1] for stage in stages[:-1])
