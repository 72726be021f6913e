"""Our core attention beside Megatron's local one, and beside the formula."""

import math
from collections.abc import Callable

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.data.segments import causal_mask, cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from tests.helpers.processes import in_ranks
from tests.megatron.models.attention_ranks import CHANNELS, HEADS, assert_alike, config, inputs, run, start

SIZE, QUERIES = 3, 16
LENGTHS = torch.tensor([16, 9, 1])
MASKS: dict[str, Callable[[], torch.Tensor | None]] = {
    "none": lambda: None,
    "encoder": lambda: encoder_mask(LENGTHS, QUERIES),
    "decoder": lambda: decoder_mask(LENGTHS, QUERIES),
    "causal": lambda: causal_mask(QUERIES, "cpu"),
    "cross": lambda: cross_mask(torch.tensor([24, 1, 7]), QUERIES, 24),
}
IN_FP32 = {"attention_softmax_in_fp32": True}
# mask, causal attention, groups of keys and values, options of the configuration
LIKE_MEGATRONS = (
    ("none", False, 4, {}),
    ("none", True, 4, {}),
    ("causal", True, 4, {}),
    ("encoder", False, 4, {}),
    ("decoder", True, 4, {}),
    ("cross", False, 4, {}),
    ("decoder", True, 2, {}),
    ("none", True, 1, {}),
    ("encoder", False, 4, {"softmax_scale": 0.7}),
    ("decoder", True, 4, {"apply_query_key_layer_scaling": True, **IN_FP32}),
    ("decoder", True, 4, {"bf16": True, **IN_FP32}),
)
# mask, causal attention
WITH_BIAS = [("none", False), ("none", True), ("encoder", False), ("decoder", True), ("cross", False)]


def kind_of(causal: bool) -> AttnMaskType:
    return AttnMaskType.causal if causal else AttnMaskType.padding


@in_ranks(1)
def test_it_computes_what_megatrons_local_attention_does():
    start()
    for mask, causal, groups, options in LIKE_MEGATRONS:
        model_config, forbidden = config(num_query_groups=groups, **options), MASKS[mask]()
        keys = QUERIES if forbidden is None else forbidden.size(3)
        tensors = inputs(QUERIES, keys, groups, SIZE)
        if model_config.bf16:
            tensors = [tensor.bfloat16() for tensor in tensors]
        ours, theirs = (
            run(lambda q, k, v: attention(q, k, v, forbidden), tensors[:3], tensors[3])  # noqa: B023  (it runs at once)
            for attention in (
                cls(model_config, 3, kind_of(causal), "self", softmax_scale=options.get("softmax_scale"))
                for cls in (SdpaCoreAttention, DotProductAttention)
            )
        )
        assert ours[0].is_contiguous()
        assert_alike(ours, theirs, atol=0.05 if model_config.bf16 else 1e-5)


@in_ranks(1)
def test_a_bias_is_added_to_the_scaled_scores():
    start()
    for mask, causal in WITH_BIAS:
        forbidden = MASKS[mask]()
        keys = QUERIES if forbidden is None else forbidden.size(3)
        *tensors, gradient = inputs(QUERIES, keys, samples=SIZE)
        hidden = causal_mask(QUERIES, "cpu") if forbidden is None and causal else forbidden

        def formula(query, key, value, bias, hidden=hidden):
            scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / math.sqrt(CHANNELS) + bias
            scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
            return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).flatten(2)

        attention = SdpaCoreAttention(config(), 1, kind_of(causal), "self")

        def ours(query, key, value, bias, attention=attention, forbidden=forbidden):
            return attention(query, key, value, forbidden, attention_bias=bias)

        leaves = [*tensors, torch.randn(1, HEADS, QUERIES, keys)]
        assert_alike(run(ours, leaves, gradient), run(formula, leaves, gradient), atol=1e-5)


@in_ranks(1)
def test_dropout():
    """Weights are dropped in training alone, from the state that differs between tensor-parallel ranks."""
    start()
    tensors = inputs(QUERIES, QUERIES, samples=SIZE)[:3]
    attention = SdpaCoreAttention(config(attention_dropout=0.5), 1, AttnMaskType.padding, "self")
    whole = SdpaCoreAttention(config(), 1, AttnMaskType.padding, "self")(*tensors, None)
    default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    first, second = attention(*tensors, None), attention(*tensors, None)
    assert not torch.equal(first, second) and not torch.equal(first, whole)
    assert torch.equal(torch.get_rng_state(), default)
    get_cuda_rng_tracker().set_states(tracked)
    assert torch.equal(attention(*tensors, None), first)
    mean = torch.stack([attention(*tensors, None) for _ in range(800)]).mean(0)
    assert (mean - whole).abs().max() < 0.25
    assert torch.equal(attention.eval()(*tensors, None), whole)


@in_ranks(1)
def test_what_it_does_not_have_is_refused():
    start()
    for change, said in (
        ({"window_size": (4, 0)}, "does not have sliding windows[\\s\\S]*use --dynapipe-attention megatron"),
        ({"softmax_type": "learnable"}, "does not have the learnable softmax"),
    ):
        with pytest.raises(ConfigError, match=said):
            SdpaCoreAttention(config(**change), 1, AttnMaskType.causal, "self")
