"""Models with latent attention, sliding windows, sinks and shared experts: published sizes, work counted by hand."""

from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, ModelShape, PipelineLayout, model_of_layers
from megatron_dynapipe.costing.attention import Latent, Window
from megatron_dynapipe.costing.hugging_face import megatron_flags
from megatron_dynapipe.costing.recipe import recipe_flags
from megatron_dynapipe.costing.shape import megatron_arguments, megatron_fields
from megatron_dynapipe.costing.state import parameter_bytes
from megatron_dynapipe.costing.work import LayerWork

DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "attention_bias": True,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "max_position_embeddings": 131072,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    "max_position_embeddings": 32768, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 +
    ["sliding_attention"] * 2,
}  # fmt: skip
B, Q = np.array(3.0), np.array(100.0)


def of_hugging_face(config: dict[str, Any]) -> ModelShape:
    return ModelShape(family=ModelFamily.GPT, **megatron_fields(megatron_arguments(megatron_flags(config))))


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        pytest.param(DEEPSEEK, 671.026, id="DeepSeek-V3, without its layer of several tokens"),
        pytest.param(GLM, 106.85, id="GLM-4.5-Air, likewise"),
        pytest.param(GPT_OSS, 20.9, id="gpt-oss-20b"),
        pytest.param(GEMMA, 1.0, id="Gemma 3 1B"),
    ],
)
def test_parameters_are_those_that_are_published(config: dict[str, Any], billions: float) -> None:
    shape = of_hugging_face(config)
    tables = AnalyticCostModel(shape, A100_RATES, max_size=1, max_length=8).tables(
        tensor_parallel=1, recompute=Recompute.NONE
    )
    layers = config["num_hidden_layers"]
    model = model_of_layers(ModelFamily.GPT, layers, expert_layers=shape.experts.layers if shape.experts else ())
    (counted,) = parameter_bytes(PipelineLayout.equal(model, 1), tables.state) // 2
    assert counted / 1e9 == pytest.approx(billions, rel=2e-3)


def test_work_of_latent_attention_by_hand() -> None:
    latent = Latent(query_rank=24, rank=16, channels=12, rotary=8, value_channels=10)
    shape = msgspec.structs.replace(of_hugging_face(GEMMA), hidden=64, heads=4, latent=latent, window=None)
    work = LayerWork(shape=shape).self_attention(B, Q)
    down, up = 64 * (24 + 16 + 8), 4 * (24 * 20 + 16 * (12 + 10))
    assert work.linear_flops == 2 * 300 * (down + up + 4 * 10 * 64)
    assert work.core_flops == 2 * 3 * 100 * 100 * 4 * (20 + 10)
    assert shape.key_value_channels == 4 * (20 + 10) / 2
    ranks = LayerWork(shape=shape, tensor_parallel=2).self_attention(B, Q)
    assert ranks.linear_flops == 2 * 300 * (down + (up + 4 * 10 * 64) / 2), "each rank has all of the compressions"


def test_latent_queries_may_be_projected_at_once() -> None:
    latent = Latent.of_megatron({"multi_latent_attention": True, "qk_layernorm": True})
    assert latent == Latent(query_rank=0, rank=32, channels=128, rotary=64, value_channels=128)
    assert latent.compressing(8) == 8 * (32 + 64) and latent.expanding(8, 2) == 2 * (8 * 192 + 32 * 256)


def test_a_window_hides_what_lies_before_it() -> None:
    """Of 26 layers 22 see 512 keys each: pairs are counted as without windows, half of which are masked."""
    shape = of_hugging_face(GEMMA)
    assert shape.window == Window(keys=512, layers=22, among=26)
    work, without = (
        LayerWork(shape=one).self_attention(np.array(1.0), np.array(2048.0))
        for one in (shape, msgspec.structs.replace(shape, window=None))
    )
    seen = sum(min(position + 1, 512) for position in range(2048)) / sum(range(1, 2049))
    assert work.core_flops / without.core_flops == pytest.approx((22 * seen + 4) / 26, rel=1e-3)
    assert work.linear_flops == without.linear_flops
    assert shape.seen(np.array(300.0)) == 300


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"window_size": [127, 0], "window_attn_skip_freq": 2, "softmax_type": "learnable"},
            Window(keys=128, layers=2, among=4),
        ),
        (
            {"window_size": 512, "interleaved_attn_pattern": [5, 1], "num_layers": 6},
            Window(keys=512, layers=5, among=6),
        ),
        ({"window_size": (15, 0), "attn_logit_softcapping": 50.0}, Window(keys=16, layers=2, among=4)),
        ({"window_size": "15,0", "window_attn_skip_freq": "[0]+[1]*3"}, Window(keys=16, layers=3, among=4)),
        ({"window_size": (15, 0)}, Window(keys=16, layers=4, among=4)),
        ({"window_size": (-1, -1)}, None),
        ({"window_attn_skip_freq": 2}, None),
    ],
)
def test_windows_of_a_recipe(model: dict[str, Any], expected: Window | None) -> None:
    flags = recipe_flags({"hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, **model})
    fields = megatron_fields(megatron_arguments(flags))
    assert fields["window"] == expected and fields["sinks"] == ("softmax_type" in model)


def test_windows_as_wide_as_samples_are_none() -> None:
    assert "window-size" in megatron_flags(GEMMA) and "window-size" not in megatron_flags(
        GEMMA | {"sliding_window": 32768}
    )
