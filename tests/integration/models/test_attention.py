from tests.helpers.processes import run_ranks

RANKS = "tests.integration.models.attention_ranks"


IN_FP32 = {"attention_softmax_in_fp32": True}
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
    "scaled by layer": ("decoder", True, 4, {"apply_query_key_layer_scaling": True, **IN_FP32}, False),
    "bf16": ("decoder", True, 4, IN_FP32, True),
}


# mask, causal attention
WITH_BIAS = [("none", False), ("none", True), ("encoder", False), ("decoder", True), ("cross", False)]


def test_it_computes_what_megatrons_local_attention_does():
    found = run_ranks(f"{RANKS}:compare_all", 1, {"cases": list(LIKE_MEGATRONS.values())})[0]
    for (name, case), differences in zip(LIKE_MEGATRONS.items(), found, strict=True):
        bf16 = case[-1]
        assert max(differences) < (0.05 if bf16 else 1e-5), name


def test_a_bias_is_added_to_the_scaled_scores():
    found = run_ranks(f"{RANKS}:compare_biases", 1, {"cases": WITH_BIAS})[0]
    for case, differences in zip(WITH_BIAS, found, strict=True):
        assert max(differences) < 1e-5, case


def test_dropout():
    run_ranks(f"{RANKS}:drop", 1)


def test_what_it_does_not_have_is_refused():
    windows, sinks = run_ranks(f"{RANKS}:refuse", 1)[0]
    assert "does not have sliding windows" in windows and "use --dynapipe-attention megatron" in windows
    assert "does not have the learnable softmax" in sinks
