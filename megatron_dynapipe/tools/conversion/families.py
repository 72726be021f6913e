"""A model as Megatron's flags describe it, from HuggingFace's configuration; what has no flags is refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily

Flags = dict[str, str | int | float | bool]
"""Keys and values of a run file."""

T5_LIKE = ("t5", "mt5")
OF_EXPERTS = ("mixtral", "qwen3_moe")
KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", *OF_EXPERTS, *T5_LIKE)
"""Values of `model_type` that can be converted."""

_ROWS_MULTIPLE = 128
"""As Megatron pads vocabularies by itself (`--make-vocab-size-divisible-by`)."""

_BIASES = (
    "Megatron has biases of queries, keys and values alone (Qwen2's), or of every linear layer at once: not of all four"
    " projections of attention without the MLP's"
)
"""Why `attention_bias` has no flags: no checkpoint of Qwen's makers has it."""

_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What `--use-rope-scaling` has besides its factor."""


def read_config(path: Path) -> Any:
    """The configuration in a folder of HuggingFace's, or in its `config.json`.

    Raises:
        ConfigError: it cannot be read, or is of a kind of model that cannot be converted.
    """
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"expected a HuggingFace model's config.json, found no {file}", hint="name its folder, downloaded whole"
        )
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a configuration of a known model: {error}") from error
    if config.model_type.startswith("gemma"):
        raise ConfigError(f"{file}: {config.model_type} is not supported: Megatron scales embeddings only for muP")
    if config.model_type not in KINDS:
        raise ConfigError(f"{file}: expected a model of type {', '.join(KINDS)}, got {config.model_type}")
    return config


def family(config: Any) -> ModelFamily:
    """Which of this project's models it is."""
    return ModelFamily.T5 if config.model_type in T5_LIKE else ModelFamily.GPT


def flags(config: Any) -> Flags:
    """The model's flags, as a run file has them; training's own are left to the user.

    Raises:
        ConfigError: the model has a part that Megatron's flags, or the conversion, do not know.
    """
    tables: Mapping[str, Callable[[Any], Flags]] = {"gpt2": _gpt2, **dict.fromkeys(T5_LIKE, _t5)}
    known = tables.get(config.model_type, _llama)(config) | {"padded-vocab-size": padded_rows(config.vocab_size)}
    dropouts: Flags = {"attention-dropout": 0.0, "hidden-dropout": 0.0}
    kernels: Flags = {"transformer-impl": "local", "no-persist-layer-norm": True, "no-masked-softmax-fusion": True}
    return known | dropouts | kernels | {"no-bias-dropout-fusion": True}


def padded_rows(vocabulary: int) -> int:
    """Rows of the embedding and the head: the whole vocabulary, in a number that up to 128 tensor-parallel ranks share.

    It stands in the run file, because a dataset's tokenizer often has fewer tokens than its model has rows.
    """
    return -(-vocabulary // _ROWS_MULTIPLE) * _ROWS_MULTIPLE


def _gpt2(config: Any) -> Flags:
    _expect(config, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,))
    _expect(config, scale_attn_by_inverse_layer_idx=(False,), tie_word_embeddings=(True,), add_cross_attention=(False,))
    return {
        "num-layers": config.n_layer,
        "hidden-size": config.n_embd,
        "num-attention-heads": config.n_head,
        "ffn-hidden-size": config.n_inner or 4 * config.n_embd,
        "dynapipe-activation": "gelu_tanh",
        "normalization": "LayerNorm",
        "norm-epsilon": config.layer_norm_epsilon,
        "position-embedding-type": "learned_absolute",
        "seq-length": config.n_positions,
        "max-position-embeddings": config.n_positions,
    }


def _llama(config: Any) -> Flags:
    projections = (False, None, config.model_type == "qwen2")  # whose biases are there whatever it says
    _expect(config, hidden_act=("silu",))
    _expect(config, hint=_BIASES, attention_bias=projections, mlp_bias=(False, None))
    _check_windows(config)
    heads = config.num_attention_heads
    flags: Flags = {
        "num-layers": config.num_hidden_layers,
        "hidden-size": config.hidden_size,
        "num-attention-heads": heads,
        "kv-channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn-hidden-size": config.intermediate_size,
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "norm-epsilon": config.rms_norm_eps,
        "position-embedding-type": "rope",
        "no-rope-fusion": True,
        "seq-length": config.max_position_embeddings,
        "max-position-embeddings": config.max_position_embeddings,
    }
    flags |= _rotations(config.rope_parameters)
    if config.num_key_value_heads != heads:
        flags |= {"group-query-attention": True, "num-query-groups": config.num_key_value_heads}
    if not config.tie_word_embeddings:
        flags["untie-embeddings-and-output-weights"] = True
    if config.model_type in OF_EXPERTS:
        flags |= _experts(config)
    if config.model_type == "qwen2":
        flags["add-qkv-bias"] = True
    if config.model_type.startswith("qwen3"):
        flags["qk-layernorm"] = True
    return flags


def experts(config: Any) -> tuple[int, list[bool]]:
    """How many experts a layer has that has any, and which layers these are."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        return config.num_local_experts, [True] * len(layers)
    dense, step = config.mlp_only_layers, config.decoder_sparse_step
    return config.num_experts, [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def _experts(config: Any) -> Flags:
    count, sparse = experts(config)
    flags: Flags = {
        "num-experts": count,
        "moe-ffn-hidden-size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "moe-router-topk": config.num_experts_per_tok,
        "moe-router-load-balancing-type": "none",
        "moe-token-dispatcher-type": "alltoall",
    }
    if not all(sparse):
        flags["moe-layer-freq"] = f"[{','.join(str(int(has)) for has in sparse)}]"
    if not getattr(config, "norm_topk_prob", True):  # of the chosen experts, as a Mixtral's
        flags["moe-router-pre-softmax"] = True
    return flags


def _check_windows(config: Any) -> None:
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if (
        (layers is None or "sliding_attention" in layers)
        and window is not None
        and window < config.max_position_embeddings
    ):
        raise ConfigError(
            f"{config.model_type}: expected a model without sliding windows, got sliding_window {window} "
            f"of {config.max_position_embeddings} positions"
        )


def _rotations(rope: Mapping[str, Any]) -> Flags:
    if rope["rope_theta"] != int(rope["rope_theta"]):
        raise ConfigError(f"expected a whole number of rope_theta, as Megatron's flag has, got {rope['rope_theta']}")
    flags: Flags = {"rotary-base": int(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return flags
    if rope["rope_type"] == "llama3" and all(rope.get(name) == value for name, value in _LLAMA3_SCALING.items()):
        return flags | {"use-rope-scaling": True, "rope-scaling-factor": float(rope["factor"])}
    raise ConfigError(
        f"expected rotary positions as they are, or scaled as LLaMA 3.1's {_LLAMA3_SCALING}, got {dict(rope)}"
    )


def _t5(config: Any) -> Flags:
    if config.feed_forward_proj not in ("gated-gelu", "gated-silu") or getattr(config, "scale_decoder_outputs", False):
        raise ConfigError(
            "expected a T5 of version 1.1: gated feed-forward layers, and a head of its own, got "
            f"feed_forward_proj {config.feed_forward_proj}, tie_word_embeddings {config.tie_word_embeddings}",
            hint="convert a v1.1, FLAN or UL2 checkpoint; the T5 of 2019 is not supported",
        )
    gate: Flags = {"dynapipe-activation": "gelu_tanh"} if config.feed_forward_proj == "gated-gelu" else {}
    return gate | {
        "dynapipe-softmax-scale": 1.0,  # a T5 does not divide its scores by √c
        "encoder-num-layers": config.num_layers,
        "decoder-num-layers": config.num_decoder_layers,
        "hidden-size": config.d_model,
        "num-attention-heads": config.num_heads,
        "kv-channels": config.d_kv,
        "ffn-hidden-size": config.d_ff,
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "norm-epsilon": config.layer_norm_epsilon,
        "position-embedding-type": "relative",
        "relative-attention-num-buckets": config.relative_attention_num_buckets,
        "relative-attention-max-distance": config.relative_attention_max_distance,
        "untie-embeddings-and-output-weights": True,
        "seq-length": 512,
        "decoder-seq-length": 512,
        "max-position-embeddings": 512,
    }


def _expect(config: Any, *, hint: str | None = None, **allowed: tuple[object, ...]) -> None:
    for name, values in allowed.items():
        value = getattr(config, name, values[0])
        if value not in values:
            expected = " or ".join(dict.fromkeys(map(str, values)))
            raise ConfigError(f"{config.model_type}: expected {name} {expected}, got {value}", hint=hint)
