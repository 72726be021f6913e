"""A HuggingFace model's run file: `costing.hugging_face`'s flags, flags for numbers; what has no flag is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import round_up
from megatron_dynapipe.costing.hugging_face import CONVERTED, OF_EXPERTS, T5_LIKE, Flags, megatron_flags

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNTIED = "untie-embeddings-and-output-weights"
_ROWS_MULTIPLE = 128
"""Megatron pads vocabularies to it by itself (`--make-vocab-size-divisible-by`)."""

_BIASES = (
    "Megatron has biases of queries, keys and values alone (Qwen2's), or of every linear layer at once: not of all four"
    " projections of attention without the MLP's"
)
"""Why `attention_bias` has no flags: no checkpoint of Qwen's makers has it."""

_IN_BRIDGE = (
    "Megatron-Bridge converts most families (AutoBridge.from_hf_pretrained), and plans train its recipes"
    " (docs/bridge.md)"
)
_ADAPTER = "adapter_config.json"
_MERGE = (
    "merge it into the model that it was trained on (peft: merge_and_unload, then save_pretrained), and convert that"
)

_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of `--use-rope-scaling` other than its factor."""
_NOT_YARNS = {"attention_factor", "partial_rotary_factor"}
"""Settings of YaRN that no flag has."""


def read_config(path: Path) -> Any:
    """The configuration in a folder of HuggingFace's, or in its `config.json`.

    Raises:
        ConfigError: it cannot be read, or is of a kind of model that cannot be converted.
    """
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and (path / _ADAPTER).is_file():
        raise ConfigError(f"expected the weights of a whole model in {path}, found an adapter of peft", hint=_MERGE)
    if not file.is_file():
        raise ConfigError(
            f"expected a HuggingFace model's config.json, found no {file}", hint="name its folder, downloaded whole"
        )
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a configuration of a known model: {error}", hint=_IN_BRIDGE) from error
    if config.model_type.startswith("gemma"):
        raise ConfigError(
            f"{file}: {config.model_type} is not supported: Megatron scales embeddings only for muP", hint=_IN_BRIDGE
        )
    if config.model_type not in CONVERTED:
        raise ConfigError(
            f"{file}: expected a model of type {', '.join(CONVERTED)}, got {config.model_type}", hint=_IN_BRIDGE
        )
    return config


def flags(config: "PreTrainedConfig", rows: int | None = None) -> Flags:
    """The model's flags, as a run file has them; training's own are left to the user.

    `padded-vocab-size`, the rows of the embedding and the head, is the whole vocabulary, in a number that up to 128
    tensor-parallel ranks share: a dataset's tokenizer often has fewer tokens than its model has rows. `rows` takes the
    place of the configuration's vocabulary.

    Raises:
        ConfigError: the model has a part that Megatron's flags, or the conversion, do not know.
    """
    kind = config.model_type
    described = megatron_flags(config.to_dict())
    numbers = _gpt2(config) if kind == "gpt2" else _t5(config) if kind in T5_LIKE else _llama(config)
    vocabulary = described.pop("vocab-size")
    if "window-size" in described:  # which PyTorch's attention does not have
        numbers["dynapipe-attention"] = "megatron"
    described |= numbers | {"padded-vocab-size": round_up(rows or vocabulary, _ROWS_MULTIPLE)}
    kernels = ("no-persist-layer-norm", "no-masked-softmax-fusion", "no-bias-dropout-fusion")
    return described | dict.fromkeys(kernels, True)


def _gpt2(config: "PreTrainedConfig") -> Flags:
    _expect(config, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,))
    _expect(config, scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    numbers = {"dynapipe-activation": "gelu_tanh", "norm-epsilon": config.layer_norm_epsilon}
    return numbers | {"seq-length": config.n_positions}


def _llama(config: "PreTrainedConfig") -> Flags:
    projections = (False, None, config.model_type == "qwen2")  # whose biases are there whatever it says
    _expect(config, hidden_act=("silu",))
    _expect(config, hint=_BIASES, attention_bias=projections, mlp_bias=(False, None))
    numbers: Flags = {"norm-epsilon": config.rms_norm_eps, "no-rope-fusion": True} | _rotations(config.rope_parameters)
    numbers |= dict.fromkeys(("seq-length", "max-position-embeddings"), config.max_position_embeddings)
    if config.model_type in OF_EXPERTS:
        numbers |= {"moe-router-load-balancing-type": "none", "moe-token-dispatcher-type": "alltoall"}
        if not getattr(config, "norm_topk_prob", True):  # of the chosen experts, as a Mixtral's
            numbers["moe-router-pre-softmax"] = True
    return numbers


def _rotations(rotations: Mapping[str, Any]) -> Flags:
    base = rotations["rope_theta"]
    if base != int(base):
        raise ConfigError(f"expected a whole number of rope_theta, as Megatron's flag has, got {base}")
    if rotations["rope_type"] == "default":
        return {"rotary-base": int(base)}
    is_llama3 = rotations["rope_type"] == "llama3"
    if is_llama3 and all(rotations.get(name) == value for name, value in _LLAMA3_SCALING.items()):
        scaling = {"use-rope-scaling": True, "rope-scaling-factor": float(rotations["factor"])}
        return {"rotary-base": int(base)} | scaling
    if rotations["rope_type"] == "yarn" and not rotations.keys() & _NOT_YARNS and rotations.get("factor"):
        return {"rotary-base": int(base)} | _yarn(rotations)
    raise ConfigError(
        f"expected rotary positions as they are, or scaled by YaRN or as LLaMA 3.1's {_LLAMA3_SCALING}, got"
        f" {dict(rotations)}",
        hint=_IN_BRIDGE,
    )


def _yarn(rotations: Mapping[str, Any]) -> Flags:
    scaling: Flags = {
        "position-embedding-type": "yarn",
        "rotary-scaling-factor": float(rotations["factor"]),
        "yarn-original-max-position-embeddings": int(rotations["original_max_position_embeddings"]),
        "yarn-beta-fast": float(rotations.get("beta_fast") or 32),
        "yarn-beta-slow": float(rotations.get("beta_slow") or 1),
        "no-yarn-correction-range-round-to-int": rotations.get("truncate", True) is False,
    }
    if rotations.get("mscale") and rotations.get("mscale_all_dim"):
        scaling |= {"mscale": float(rotations["mscale"]), "mscale-all-dim": float(rotations["mscale_all_dim"])}
    return {name: value for name, value in scaling.items() if value is not False}


def _t5(config: "PreTrainedConfig") -> Flags:
    if config.feed_forward_proj not in ("gated-gelu", "gated-silu") or getattr(config, "scale_decoder_outputs", False):
        raise ConfigError(
            "expected a T5 of version 1.1: gated feed-forward layers, and a head of its own, got "
            f"feed_forward_proj {config.feed_forward_proj}, tie_word_embeddings {config.tie_word_embeddings}",
            hint="convert a v1.1, FLAN or UL2 checkpoint; the T5 of 2019 is not supported",
        )
    gate: Flags = {"dynapipe-activation": "gelu_tanh"} if config.feed_forward_proj == "gated-gelu" else {}
    return gate | {
        "dynapipe-softmax-scale": 1.0,  # a T5 does not divide its scores by √c
        "norm-epsilon": config.layer_norm_epsilon,
        "relative-attention-max-distance": config.relative_attention_max_distance,
        UNTIED: True,
        **dict.fromkeys(("seq-length", "decoder-seq-length", "max-position-embeddings"), 512),
    }


def _expect(config: "PreTrainedConfig", *, hint: str | None = None, **allowed: tuple[object, ...]) -> None:
    for name, values in allowed.items():
        value = getattr(config, name, values[0])
        if value not in values:
            expected = " or ".join(dict.fromkeys(map(str, values)))
            raise ConfigError(f"{config.model_type}: expected {name} {expected}, got {value}", hint=hint)
