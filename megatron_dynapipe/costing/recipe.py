"""The flags of Megatron-LM that say what a recipe of Megatron-Bridge says of its model."""

from collections.abc import Mapping
from typing import Any

_SAME = (
    *("hidden_size", "num_layers", "num_attention_heads", "kv_channels", "ffn_hidden_size", "vocab_size", "seq_length"),
    *("make_vocab_size_divisible_by", "normalization", "qk_layernorm", "position_embedding_type", "add_qkv_bias"),
    *("attention_dropout", "hidden_dropout", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_shared_expert_intermediate_size", "num_query_groups", "hybrid_layer_pattern", "mtp_num_layers"),
    *("context_parallel_size", "window_size"),
)
NAMES = (
    *_SAME,
    *("num_moe_experts", "hybrid_override_pattern", "gated_linear_unit", "add_bias_linear", "bias_activation_fusion"),
    "share_embeddings_and_output_weights",
)
"""Attributes of a recipe's model that are read."""


def recipe_flags(model: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's flags for a recipe's model.

    Args:
        model: the `NAMES` that it has, as its saved YAML has them under `model`; others are ignored.
    """
    flags = {name.replace("_", "-"): model[name] for name in _SAME if model.get(name) is not None}
    groups = model.get("num_query_groups")
    flags |= {
        "num-experts": model.get("num_moe_experts"),
        "group-query-attention": groups is not None and groups != model.get("num_attention_heads"),
        "swiglu": model.get("gated_linear_unit", False),
        "untie-embeddings-and-output-weights": not model.get("share_embeddings_and_output_weights", True),
        "disable-bias-linear": not model.get("add_bias_linear", True),
        "no-bias-swiglu-fusion": not model.get("bias_activation_fusion", True),
        "max-position-embeddings": model.get("seq_length"),
        "hybrid-layer-pattern": model.get("hybrid_layer_pattern") or model.get("hybrid_override_pattern"),
    }
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def model_of(recipe: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model of a recipe's saved YAML, its newer form's two parts as one; None of another mapping."""
    model = recipe.get("model")
    if not isinstance(model, Mapping) or not str(model.get("_target_", "")).startswith("megatron.bridge."):
        return None
    transformer = model.get("transformer")
    return {**(transformer if isinstance(transformer, Mapping) else {}), **model}
