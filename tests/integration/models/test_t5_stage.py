import pytest

from tests.helpers.processes import run_ranks

SPLITS = {
    "2 + 2": (2, 2, [[2, 2], [1, 1, 1, 1], [1, 2, 1], [3, 1]]),
    "odd depths, encoder deeper": (3, 2, [[2, 3], [4, 1], [1, 1, 1, 1, 1], [2, 2, 1]]),
    "both stacks start together": (1, 3, [[2, 2], [3, 1], [2, 1, 1]]),
}
MODELS = {
    "learned positions": ("learned_absolute", True),
    "learned positions, untied": ("learned_absolute", False),
    "rotary": ("rope", True),
    "relative, untied": ("relative", False),
    "relative": ("relative", True),
}


RANKS = "tests.integration.models.t5_ranks"


DAILY = ("learned positions", "relative, untied")
SLOW = [model for model in MODELS if model not in DAILY]


@pytest.mark.parametrize("models", [DAILY, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["daily", "others"])
def test_stages_chained_in_one_process_have_the_loss_and_gradients_of_one_stage(models):
    names = ("encoder", "decoder", "splits", "positions", "tied")
    cases = [dict(zip(names, (*SPLITS[split], *MODELS[model]), strict=True)) for split in SPLITS for model in models]
    run_ranks(f"{RANKS}:check_all", 1, {"check": "check_chains", "cases": cases})


WITH_ATTENTION = [
    (*model, attention) for model in MODELS.values() for attention in ("megatron", "sdpa") if model[0] != "relative"
] + [("relative", True, "sdpa"), ("relative", False, "sdpa")]


def test_one_stage_is_megatrons_own_t5():
    names = ("positions", "tied", "attention")
    cases = [{"encoder": 2, "decoder": 3} | dict(zip(names, case, strict=True)) for case in WITH_ATTENTION]
    run_ranks(f"{RANKS}:check_all", 1, {"check": "check_against_megatrons", "cases": cases})


def test_process_groups_made_for_another_model_are_refused():
    for message in run_ranks(f"{RANKS}:build_without_embedding_ranks", 2):  # Megatron's default
        assert "expected embedding groups of one rank, got one of 2: Megatron would reduce" in message
        assert "give pretrain the split's embedding_ranks" in message
