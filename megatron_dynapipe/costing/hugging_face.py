"""A HuggingFace configuration (`config.json` as a mapping) in Megatron's flags, as far as they decide costs.

Computed costs, `--model-config` and conversion, which adds the flags that decide numbers alone, read it here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.shape import MOST_SIZE

Flags = dict[str, Any]
"""Keys and values of a run file."""

T5_LIKE = ("t5", "mt5")
OF_EXPERTS = ("mixtral", "qwen3_moe")
CONVERTED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", *OF_EXPERTS, *T5_LIKE)
"""Values of `model_type` whose weights are converted."""
KINDS = (*CONVERTED, "gemma2", "gemma3_text", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3")
"""Those that are known whole; of others only the sizes are read."""
_LATENT = {
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_nope_head_dim": "qk-head-dim",
    "qk_rope_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
}
"""Sizes of multi-latent attention, and Megatron's flags of them."""


MOST_LAYERS = 10_000


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """Which of this project's models it is."""
    is_t5 = config.get("is_encoder_decoder") or config["model_type"] in (*T5_LIKE, "umt5")
    return ModelFamily.T5 if is_t5 else ModelFamily.GPT


def obstacle_in(config: Mapping[str, Any]) -> str:
    """The part of a model that computed costs do not know; empty where there is none."""
    kind = config["model_type"]
    return "" if kind in KINDS else f"a model of type {kind} (known: {', '.join(KINDS)})"


def megatron_flags(config: Mapping[str, Any]) -> Flags:
    """The flags of the model's sizes and kinds of layers, without those whose entries are missing.

    Raises:
        ConfigError: it lacks its width or its layers, or a size is not a whole number above 0.
    """
    kind = config["model_type"]
    flags: Flags = {"hidden-size": required_size(config, "hidden_size", "d_model", "n_embd")}
    if family_of(config) is ModelFamily.T5:
        encoder = ("encoder_layers", "num_layers", "num_hidden_layers")
        decoder = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
        flags |= {"encoder-num-layers": required_size(config, *encoder)}
        flags |= {"decoder-num-layers": required_size(config, *decoder)}
    else:
        flags |= {"num-layers": required_size(config, "num_hidden_layers", "n_layer", "num_layers")}
    if kind in KINDS:
        readers: Mapping[str, Callable[[Mapping[str, Any], Flags], Flags]]
        readers = {"gpt2": _gpt2, **dict.fromkeys(T5_LIKE, _t5)}
        flags |= readers.get(kind, _llama)(config, flags) | {"vocab-size": size(config, "vocab_size")}
        flags |= {"attention-dropout": 0.0, "hidden-dropout": 0.0}
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def size(values: Mapping[str, Any], *names: str) -> int | None:
    """The first of the names that has a value; raises ConfigError where it is none from 1 to its largest."""
    for name in names:
        value = values.get(name)
        if value is not None:
            most = MOST_LAYERS if "layer" in name else MOST_SIZE
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
                raise ConfigError(f"{name}: expected a whole number from 1 to {most}, got {value!r:.60}")
            return value
    return None


def required_size(values: Mapping[str, Any], *names: str) -> int:
    """As `size`; raises ConfigError where none has a value, too."""
    if (value := size(values, *names)) is None:
        raise ConfigError(
            f"expected {' or '.join(names)}, found none of them",
            hint="give a run file such as those in configs/, a config.json of HuggingFace, or the sizes by flags",
        )
    return value


def _gpt2(config: Mapping[str, Any], flags: Flags) -> Flags:
    return {
        "num-attention-heads": size(config, "n_head"),
        "ffn-hidden-size": size(config, "n_inner") or 4 * flags["hidden-size"],
        "normalization": "LayerNorm",
        "position-embedding-type": "learned_absolute",
        "max-position-embeddings": size(config, "n_positions") or 1024,
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", True),
    }


def _llama(config: Mapping[str, Any], flags: Flags) -> Flags:
    kind, heads, groups = config["model_type"], size(config, "num_attention_heads"), size(config, "num_key_value_heads")
    is_grouped = groups not in (None, heads)
    return {
        "num-attention-heads": heads,
        "kv-channels": size(config, "head_dim") or (flags["hidden-size"] // heads if heads else None),
        "ffn-hidden-size": size(config, "intermediate_size"),
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "group-query-attention": is_grouped,
        "num-query-groups": groups if is_grouped else None,
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", kind.startswith("gemma")),
        "add-qkv-bias": kind.startswith("qwen2") or bool(config.get("attention_bias")),
        "qk-layernorm": kind.startswith(("qwen3", "gemma3", "deepseek")) or bool(config.get("use_qk_norm")),
        "softmax-type": "learnable" if kind == "gpt_oss" else None,
        **_latent(config),
        **_windows(config, flags["num-layers"]),
        **_experts(config, flags["num-layers"]),
    }


def _latent(config: Mapping[str, Any]) -> Flags:
    if size(config, "kv_lora_rank") is None:
        return {}
    return {"multi-latent-attention": True, **{flag: size(config, name) for name, flag in _LATENT.items()}}


def _windows(config: Mapping[str, Any], layers: int) -> Flags:
    """Sliding windows, and which layers have them; none that are no narrower than samples can be long."""
    kind, window, types = config["model_type"], size(config, "sliding_window"), config.get("layer_types")
    used = config.get("use_sliding_window", kind in ("mistral", "mixtral"))
    have = [used] * layers if types is None else [name == "sliding_attention" for name in types]
    if not window or not any(have) or window >= (config.get("max_position_embeddings") or 0):
        return {}
    skipped = {} if all(have) else {"window-attn-skip-freq": f"[{','.join(str(int(has)) for has in have)}]"}
    return {"window-size": f"{window - 1},0", **skipped}


def _experts(config: Mapping[str, Any], layers: int) -> Flags:
    if (count := size(config, "num_local_experts", "num_experts", "n_routed_experts")) is None:
        return {}
    step, dense = size(config, "decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError(f"mlp_only_layers: expected a list of layers, got {dense!r:.60}")
    first = (size(config, "first_k_dense_replace") or 0) if config.get("first_k_dense_replace") else 0
    sparse = [int(layer >= first and (layer + 1) % step == 0 and layer not in dense) for layer in range(layers)]
    if not any(sparse):
        return {}
    return {
        "num-experts": count,
        "moe-ffn-hidden-size": (width := required_size(config, "moe_intermediate_size", "intermediate_size")),
        "moe-shared-expert-intermediate-size": width * (size(config, "n_shared_experts") or 0) or None,
        "moe-router-topk": required_size(config, "num_experts_per_tok"),
        "moe-layer-freq": None if all(sparse) else f"[{','.join(map(str, sparse))}]",
    }


def _t5(config: Mapping[str, Any], _flags: Flags) -> Flags:
    return {
        "num-attention-heads": size(config, "num_heads"),
        "kv-channels": size(config, "d_kv"),
        "ffn-hidden-size": size(config, "d_ff"),
        "swiglu": str(config.get("feed_forward_proj", "relu")).startswith("gated"),
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "relative",
        "relative-attention-num-buckets": size(config, "relative_attention_num_buckets") or 32,
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", config["model_type"] == "t5"),
    }
