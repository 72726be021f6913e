"""`--model-config`: a model's kind and sizes from a run file of Megatron's flags or a HuggingFace `config.json`.

The file is all that is needed: a flag beside it may only say the same. What costs do not model is refused by name.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from megatron_dynapipe.config import load_yaml
from megatron_dynapipe.cost import Experts, ModelShape
from megatron_dynapipe.cost.shape import megatron_fields
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily, target_positions

GPT, T5 = ModelFamily.GPT, ModelFamily.T5

# What HuggingFace's configurations call a size, in the order in which they are looked up.
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_ENCODER = ("encoder_layers", "num_layers", "num_hidden_layers")
_DECODER = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_T5_LIKE = ("t5", "mt5")
_COUNTED = ("gpt2", *_LLAMA_LIKE, *_T5_LIKE)
"""Values of `model_type` whose costs can be computed."""

_NOT_MODELLED = (
    *("multi-latent-attention", "mtp-num-layers", "window-size", "experimental-attention-variant", "is-hybrid-model"),
    *("heterogeneous-layers-config-path", "hybrid-layer-pattern", "moe-latent-size", "moe-shared-expert-gate"),
    *("fp8-format", "fp4-format", "context-parallel-size", "expert-tensor-parallel-size", "fp32-residual-connection"),
)
"""Flags of layers that computed costs do not know."""

_SIZES = (
    *("hidden-size", "num-layers", "num-attention-heads", "kv-channels", "ffn-hidden-size", "num-query-groups"),
    *("padded-vocab-size", "vocab-size", "make-vocab-size-divisible-by", "max-position-embeddings", "seq-length"),
    *("relative-attention-num-buckets", "num-experts", "moe-router-topk", "moe-ffn-hidden-size"),
    "moe-shared-expert-intermediate-size",
)
_SWITCHED_OFF = {
    "disable-bias-linear": "add_bias_linear",
    "no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
}
"""Flags that set an attribute of another name to false."""

FLAGS: Mapping[str, str] = {
    "num_attention_heads": "heads",
    "kv_channels": "kv_channels",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocabulary",
}
"""Arguments that say more of a model than its layers and hidden size, and what `ModelShape` calls them."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a file describes it; `layers` of a GPT, the other two of a T5.

    Attributes:
        max_seq_len, max_target_len: most tokens of an input (with a GPT, of its target too), and of a target of a T5;
            None where no run file says so.
        shape: fields of `ModelShape` besides family and hidden size; some may be missing.
        obstacle: what of it computed costs do not model; empty where there is nothing.
        data: the dataset whose vocabulary the model has; None where no run file names one.
    """

    model: ModelFamily
    hidden_size: int
    layers: int | None = None
    encoder_layers: int | None = None
    decoder_layers: int | None = None
    max_seq_len: int | None = None
    max_target_len: int | None = None
    shape: dict[str, Any] = {}
    obstacle: str = ""
    data: Path | None = None


def take_model_config(args: argparse.Namespace) -> None:
    """Set what the command line leaves open from the file of `--model-config`.

    Raises:
        ConfigError: as `read_model`, or a flag says something else than the file.
    """
    model = read_model(args.model_config)
    sizes = ("hidden_size", "layers", "encoder_layers", "decoder_layers")
    said = {name: getattr(model, name) for name in ("model", *sizes)}
    said |= {name: model.shape.get(field) for name, field in FLAGS.items()}
    for name, value in said.items():
        flag = getattr(args, name)
        if flag is None:
            setattr(args, name, value)
        elif value is not None and flag != value:
            raise ConfigError(
                f"expected --{name.replace('_', '-')} {value}, as in {args.model_config}, got {flag}",
                hint="leave the flag out: the file says it",
            )
    args.model_file, args.run_lengths = model, (model.max_seq_len, model.max_target_len)


def given_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ModelShape` besides family and hidden size, as completed arguments say them; some may be missing."""
    file: ModelFile | None = getattr(args, "model_file", None)
    shape = dict(file.shape) if file is not None else {}
    return shape | {field: getattr(args, name) for name, field in FLAGS.items() if getattr(args, name) is not None}


def experts_of(args: argparse.Namespace) -> Experts | None:
    """The model's experts; raises ConfigError where they cannot be shared or run as the arguments ask."""
    experts: Experts | None = given_numbers(args).get("experts")
    shared, count = args.expert_parallel, 1 if experts is None else experts.count
    if count % shared or args.data_parallel % shared:
        raise ConfigError(
            f"expected --expert-parallel to divide {count} experts and {args.data_parallel} replicas, got {shared}",
            hint="experts are those of the model's file: --model-config FILE",
        )
    if experts is not None and args.split_backward == "on":
        raise ConfigError("--split-backward on: experts compute all gradients together", hint="leave it at auto")
    return experts


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The whole model for computed costs: of the file, else of the flags, which are those of the published layer.

    Raises:
        ConfigError: a number is missing, or the model has what is not modelled.
    """
    file: ModelFile | None = getattr(args, "model_file", None)
    if file is not None and file.obstacle:
        raise ConfigError(
            f"costs are not computed for {file.obstacle}, in {args.model_config}",
            hint="measure them: megatron-dynapipe profile",
        )
    shape = given_numbers(args)
    if "vocabulary" not in shape and (folder := args.data or (file.data if file is not None else None)) is not None:
        from megatron_dynapipe.data.meta import read_meta

        shape |= {"vocabulary": read_meta(folder).vocabulary_size, "vocabulary_multiple": 128}
    missing = [name for name, field in FLAGS.items() if field in ("heads", "vocabulary") and field not in shape]
    if missing:
        raise ConfigError(
            f"--cost-model analytic needs {', '.join('--' + name.replace('_', '-') for name in missing)}",
            hint="name a run file or a config.json that has all of a model: --model-config FILE",
        )
    shape.setdefault("kv_channels", max(1, args.hidden_size // shape["heads"]))
    shape.setdefault("ffn", 4 * args.hidden_size)
    return ModelShape(family=args.model, hidden=args.hidden_size, **shape)


def read_model(path: Path) -> ModelFile:
    """The model that a file describes.

    Raises:
        ConfigError: it cannot be read, is neither of the two kinds, or lacks a size.
    """
    try:
        loaded = load_yaml(path)  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"cannot read the model's configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"expected {path} to be YAML or JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected {path} to be a mapping, got {type(loaded).__name__}")
    entries = _Entries({str(name): value for name, value in loaded.items()}, path)
    return _of_hugging_face(entries) if "model_type" in entries.values else _of_run_file(entries)


class _Entries:
    """The entries of a file."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def number(self, *names: str) -> int:
        """The first of the names that has a value; raises ConfigError where none has."""
        value = self.optional(*names)
        if value is None:
            raise ConfigError(
                f"{self.path}: expected {' or '.join(names)}, found none of them",
                hint="give a run file such as those in configs/, a config.json of HuggingFace, or the sizes by flags",
            )
        return value

    def optional(self, *names: str) -> int | None:
        """The first of the names that has a value, if one has."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
                    raise ConfigError(f"{self.path}: {name}: expected a whole number above 0, got {value!r}")
                return value
        return None

    def is_set(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.values.get(name) not in (None, False, 0, "")


def _of_run_file(entries: _Entries) -> ModelFile:
    entries.number("hidden-size")
    args = {name.replace("-", "_"): value for name, value in entries.values.items()}  # as in Megatron's namespace
    args |= {attribute: False for name, attribute in _SWITCHED_OFF.items() if entries.is_set(name)}
    args |= {name.replace("-", "_"): entries.optional(name) for name in _SIZES}
    unknown = [name for name in _NOT_MODELLED if entries.is_set(name) and str(entries.values[name]) != "1"]
    is_t5 = "encoder-num-layers" in entries.values or "decoder-num-layers" in entries.values
    layers: dict[str, Any] = {"layers": None if is_t5 else entries.number("num-layers")}
    if is_t5:
        layers |= {"encoder_layers": entries.number("encoder-num-layers", "num-layers")}
        layers |= {"decoder_layers": entries.number("decoder-num-layers", "num-layers")}
        if (length := entries.optional("decoder-seq-length")) is not None:
            layers |= {"max_target_len": max(length - target_positions(T5, 0), 1)}
    try:
        shape = megatron_fields(args)
    except ConfigError as error:
        raise ConfigError(f"{entries.path}: {error.message}") from None
    folder, longest = entries.values.get("dynapipe-data"), entries.optional("seq-length")
    return ModelFile(
        model=T5 if is_t5 else GPT,
        hidden_size=shape.pop("hidden"),
        shape=shape,
        obstacle=", ".join(unknown),
        data=Path(folder) if folder and Path(folder).is_dir() else None,
        max_seq_len=longest and longest + (not is_t5),  # n tokens of a GPT train n - 1 positions
        **layers,
    )


def _of_hugging_face(entries: _Entries) -> ModelFile:
    hidden, kind = entries.number(*_HIDDEN), str(entries.values["model_type"])
    obstacle, shape = _unknown(entries, kind), {}
    if not obstacle:
        read = _gpt2 if kind == "gpt2" else _t5 if kind in _T5_LIKE else _llama
        shape = read(entries, hidden) | dict.fromkeys(("attention_dropout", "hidden_dropout", "keeps_scores"), False)
        if (rows := entries.optional("vocab_size")) is not None:
            shape |= {"vocabulary": rows, "vocabulary_multiple": 128}
        shape = {name: value for name, value in shape.items() if value is not None}
    common: dict[str, Any] = {"hidden_size": hidden, "shape": shape, "obstacle": obstacle}
    if entries.values.get("is_encoder_decoder") or kind in (*_T5_LIKE, "umt5"):
        encoder, decoder = entries.number(*_ENCODER), entries.number(*_DECODER)
        return ModelFile(model=T5, encoder_layers=encoder, decoder_layers=decoder, **common)
    return ModelFile(model=GPT, layers=entries.number(*_LAYERS), **common)


def _unknown(entries: _Entries, kind: str) -> str:
    """The part of a model that computed costs do not know; empty where they know all."""
    if kind not in _COUNTED:
        return f"a model of type {kind} (known: {', '.join(_COUNTED)})"
    window, positions = entries.values.get("sliding_window"), entries.values.get("max_position_embeddings", 0)
    used = entries.values.get("use_sliding_window", kind in ("mistral", "mixtral"))
    return f"sliding_window {window}" if used and window is not None and window < positions else ""


def _gpt2(entries: _Entries, hidden: int) -> dict[str, Any]:
    heads = entries.optional("n_head")
    return {
        "heads": heads,
        "kv_channels": hidden // heads if heads else None,
        "ffn": entries.optional("n_inner") or 4 * hidden,
        "positions": entries.optional("n_positions") or 1024,
        "tied": entries.values.get("tie_word_embeddings", True),
    }


def _llama(entries: _Entries, hidden: int) -> dict[str, Any]:
    kind, heads = str(entries.values["model_type"]), entries.optional("num_attention_heads")
    return {
        "heads": heads,
        "query_groups": entries.optional("num_key_value_heads"),
        "kv_channels": entries.optional("head_dim") or (hidden // heads if heads else None),
        "ffn": entries.optional("intermediate_size"),
        "gated": True,
        "rms_norm": True,
        "biases": False,
        "qkv_bias": kind.startswith("qwen2") or bool(entries.values.get("attention_bias")),
        "qk_norm": kind.startswith("qwen3"),
        "rotary": True,
        "tied": bool(entries.values.get("tie_word_embeddings", False)),
        "experts": _experts(entries),
    }


def _experts(entries: _Entries) -> Experts | None:
    count = entries.optional("num_local_experts", "num_experts")
    if count is None:
        return None
    step, dense = entries.optional("decoder_sparse_step") or 1, entries.values.get("mlp_only_layers") or []
    layers = entries.number(*_LAYERS)
    sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense]
    if not sparse:
        return None
    return Experts(
        count=count,
        per_token=entries.number("num_experts_per_tok"),
        ffn=entries.number("moe_intermediate_size", "intermediate_size"),
        layers=() if len(sparse) == layers else tuple(sparse),
    )


def _t5(entries: _Entries, _hidden: int) -> dict[str, Any]:
    return {
        "heads": entries.optional("num_heads"),
        "kv_channels": entries.optional("d_kv"),
        "ffn": entries.optional("d_ff"),
        "gated": str(entries.values.get("feed_forward_proj", "relu")).startswith("gated"),
        "rms_norm": True,
        "biases": False,
        "relative_buckets": entries.optional("relative_attention_num_buckets") or 32,
        "tied": entries.values.get("tie_word_embeddings", entries.values["model_type"] == "t5"),
    }
