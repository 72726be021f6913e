import pytest

from tests.helpers.processes import run_ranks


def call(rank: int, world_size: int, function: str, **arguments: object) -> object:
    """Run a function of `attention_ranks`, whose import of Megatron only the ranks should see."""
    from tests.integration.models import attention_ranks

    return getattr(attention_ranks, function)(rank, world_size, **arguments)


# mask, causal attention, groups of keys and values, options of the configuration, bf16
LIKE_MEGATRONS = {
    "no mask": ("none", False, 4, {}, False),
    "causal without a mask": ("none", True, 4, {}, False),
    "causal by a mask": ("causal", True, 4, {}, False),
    "padded inputs": ("encoder", False, 4, {}, False),
    "padded targets": ("decoder", True, 4, {}, False),
    "of the decoder to the encoder": ("cross", False, 4, {}, False),
    "two groups": ("decoder", True, 2, {}, False),
    "one group, no mask": ("none", True, 1, {}, False),
    "a scale of its own": ("encoder", False, 4, {"softmax_scale": 0.7}, False),
    "scaled by layer": (
        "decoder",
        True,
        4,
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        False,
    ),
    "bf16": ("decoder", True, 4, {"attention_softmax_in_fp32": True}, True),
}


@pytest.mark.parametrize(
    ("mask", "causal", "groups", "options", "bf16"), LIKE_MEGATRONS.values(), ids=LIKE_MEGATRONS.keys()
)
def test_it_computes_what_megatrons_local_attention_does(mask, causal, groups, options, bf16):
    case = {"mask": mask, "causal": causal, "groups": groups, "options": options, "bf16": bf16}
    differences = run_ranks(call, 1, {"function": "compare", **case})[0]
    assert max(differences) < (0.05 if bf16 else 1e-5)


@pytest.mark.parametrize(
    ("mask", "causal"), [("none", False), ("none", True), ("encoder", False), ("decoder", True), ("cross", False)]
)
def test_a_bias_is_added_to_the_scaled_scores(mask, causal):
    differences = run_ranks(call, 1, {"function": "compare_bias", "mask": mask, "causal": causal})[0]
    assert max(differences) < 1e-5


def test_dropout():
    run_ranks(call, 1, {"function": "drop"})


def test_what_it_does_not_have_is_refused():
    windows, sinks = run_ranks(call, 1, {"function": "refuse"})[0]
    assert "does not have sliding windows" in windows and "use --dynapipe-attention megatron" in windows
    assert "does not have the learnable softmax" in sinks
