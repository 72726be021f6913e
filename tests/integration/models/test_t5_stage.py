from tests.helpers.processes import run_ranks

RANKS = "tests.integration.models.t5_ranks"
MODELS = [
    (positions, tied, attention)
    for positions in ("learned_absolute", "rope", "relative")
    for tied in (True, False)
    for attention in ("megatron", "sdpa")
    if (positions, attention) != ("relative", "megatron")  # which has none
]


def test_one_stage_is_megatrons_own_t5():
    (refusal,) = run_ranks(f"{RANKS}:check_all", 1, {"cases": MODELS})
    assert "expected rows for the layers of Transformer Engine, got masks\nhint: give T5StageInputs its" in refusal


def test_process_groups_made_for_another_model_are_refused():
    for message in run_ranks(f"{RANKS}:build_without_embedding_ranks", 2):  # Megatron's default
        assert "expected embedding groups of one rank, got one of 2: Megatron would reduce" in message
        assert "give pretrain t5_stage.embedding_ranks" in message
