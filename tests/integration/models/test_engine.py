"""Transformer Engine's layers, which are not installed here, by what its source says that they take."""

from tests.helpers.processes import run_ranks

RANKS = "tests.integration.models.engine_ranks"


RECOMPUTED = (
    {},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)


def test_padded_rows_without_masks_train_as_masks_do():
    cases = [(positions, changes) for positions in ("rope", "relative") for changes in RECOMPUTED]
    for seen in run_ranks(f"{RANKS}:compare_all", 1, {"cases": cases})[0]:
        assert seen == [("cross", "padding"), ("self", "causal"), ("self", "padding")]


def test_the_first_backward_adds_to_gradients_too():
    assert run_ranks(f"{RANKS}:first_backward_adds", 1)[0] == [True, False, False]


def test_biases_lie_in_one_piece():
    assert run_ranks(f"{RANKS}:biases_in_one_piece", 1)[0] == [False, True]


def test_its_layers_keep_their_modules_around_our_attention():
    assert run_ranks(f"{RANKS}:our_attention_in_its_layers", 1)[0] == {
        "megatron False": ["EngineLinear", "EngineAttention", "padding"],
        "megatron True": ["EngineLinear", "EngineAttention", "causal"],
        "megatron hides": [False, True],
        "sdpa False": ["EngineLinear", "SdpaCoreAttention", "padding"],
        "sdpa True": ["EngineLinear", "SdpaCoreAttention", "causal"],
        "sdpa hides": [True, False],
        "transformer_engine False": ["EngineLinear", "EngineCoreAttention", "padding"],
        "transformer_engine True": ["EngineLinear", "EngineCoreAttention", "causal"],
        "transformer_engine hides": [True, False],
    }
