"""The flags of Megatron-LM that say what a recipe of Megatron-Bridge says of its model."""

from collections.abc import Mapping
from typing import Any

from megatron_dynapipe.core.errors import ConfigError

_SAME = (
    *("hidden_size", "num_layers", "num_attention_heads", "kv_channels", "ffn_hidden_size", "vocab_size", "seq_length"),
    *("make_vocab_size_divisible_by", "normalization", "qk_layernorm", "position_embedding_type", "add_qkv_bias"),
    *("attention_dropout", "hidden_dropout", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_shared_expert_intermediate_size", "num_query_groups", "hybrid_layer_pattern", "mtp_num_layers"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("softmax_type", "window_size", "window_attn_skip_freq", "moe_shared_expert_gate", "context_parallel_size"),
    "fp8",
)
NAMES = (
    *_SAME,
    *("num_moe_experts", "hybrid_override_pattern", "gated_linear_unit", "add_bias_linear", "bias_activation_fusion"),
    *("share_embeddings_and_output_weights", "interleaved_attn_pattern", "attn_logit_softcapping"),
)
"""Attributes of a recipe's model that are read."""


_SIZES = (
    *("hidden-size", "num-layers", "num-attention-heads", "kv-channels", "ffn-hidden-size", "vocab-size", "seq-length"),
    *("group-query-attention", "num-query-groups", "attention-dropout", "hidden-dropout", "num-experts"),
    *("moe-router-topk", "moe-ffn-hidden-size", "moe-layer-freq", "moe-shared-expert-intermediate-size"),
    *("max-position-embeddings", "hybrid-layer-pattern", "untie-embeddings-and-output-weights"),
)
"""Flags that say how large layers are; what else they have, the recipe's provider knows."""


def recipe_flags(model: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's flags for a recipe's model.

    Args:
        model: the `NAMES` that it has, as its saved YAML has them under `model`; others are ignored.
    """
    flags = {name.replace("_", "-"): model[name] for name in _SAME if model.get(name) is not None}
    groups = model.get("num_query_groups")
    if local := model.get("interleaved_attn_pattern"):  # Gemma 3's: as many layers with a window, then one without
        flags["window-attn-skip-freq"] = local[0] + 1
    elif model.get("attn_logit_softcapping"):  # Gemma 2's: every second
        flags["window-attn-skip-freq"] = 2
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


def measured_flags(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A run's flags of the sizes and the precision of a recipe's layers, which its provider builds to be measured.

    Args:
        recipe: its saved YAML.

    Raises:
        ConfigError: the mapping is of no recipe, or does not say how many tokens its model knows.
    """
    model = model_of(recipe)
    if model is None:
        raise ConfigError(
            "expected a recipe of Megatron-Bridge, got another file",
            hint="name a checkpoint's run_config.yaml; flags of Megatron, and run files, come after --",
        )
    if not model.get("vocab_size"):
        raise ConfigError(
            "expected a recipe with model.vocab_size, got one without", hint="set config.model.vocab_size"
        )
    of_model = recipe_flags(model)
    flags: dict[str, Any] = {name: of_model[name] for name in _SIZES if name in of_model}
    if isinstance(frequency := flags.get("moe-layer-freq"), list):
        flags["moe-layer-freq"] = f"[{','.join(map(str, frequency))}]"
    flags |= {"disable-bias-linear": True, "sequence-parallel": bool(model.get("sequence_parallel"))}
    mixed = recipe.get("mixed_precision") or model
    halves = [name for name in ("bf16", "fp16") if (name in mixed if isinstance(mixed, str) else mixed.get(name))]
    return {
        **{name: value for name, value in flags.items() if value is not False},
        **dict.fromkeys(halves, True),
        "global-batch-size": recipe["train"]["global_batch_size"],
        "calculate-per-token-loss": True,
        "padded-vocab-size": flags.pop("vocab-size"),
        **dict.fromkeys(("train-iters", "lr", "eval-interval"), 1),  # that Megatron asks of every run
    }


def model_of(recipe: Mapping[str, object]) -> Mapping[str, object] | None:
    """The model of a recipe's saved YAML, its newer form's two parts as one; None of another mapping."""
    model = recipe.get("model")
    if not isinstance(model, Mapping) or not str(model.get("_target_", "")).startswith("megatron.bridge."):
        return None
    transformer = model.get("transformer")
    return {**(transformer if isinstance(transformer, Mapping) else {}), **model}
