"""`--model-config`: a model's kind and sizes from a run file of Megatron's flags or a HuggingFace `config.json`.

The file is all that is needed: a flag beside it may only say the same. What costs do not model is refused by name.
"""

import argparse
import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from megatron_dynapipe.cost import Experts, ModelShape
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.units import ModelFamily, target_positions

MOST_BYTES = 10_000_000
_MOST_LAYERS = 10_000
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

FLAGS: Mapping[str, str] = {
    "num_attention_heads": "heads",
    "kv_channels": "kv_channels",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocabulary",
}
"""Arguments that say more of a model than its layers and hidden size, and what `ModelShape` calls them."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of a model; `layers` of a GPT, the other two of a T5.

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
    found = read_model(args.model_config)
    sizes = ("hidden_size", "layers", "encoder_layers", "decoder_layers")
    said = {name: getattr(found, name) for name in ("model", *sizes)}
    said |= {name: found.shape.get(field) for name, field in FLAGS.items()}
    for name, value in said.items():
        given = getattr(args, name)
        if given is None:
            setattr(args, name, value)
        elif value is not None and given != value:
            raise ConfigError(
                f"expected --{name.replace('_', '-')} {value}, as in {args.model_config}, got {given}",
                hint="leave the flag out: the file says it",
            )
    args.model_file, args.run_lengths = found, (found.max_seq_len, found.max_target_len)


def given_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ModelShape` besides family and hidden size, as completed arguments say them; some may be missing."""
    found: ModelFile | None = getattr(args, "model_file", None)
    shape = dict(found.shape) if found is not None else {}
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
    found: ModelFile | None = getattr(args, "model_file", None)
    if found is not None and found.obstacle:
        raise ConfigError(
            f"costs are not computed for {found.obstacle}, in {args.model_config}",
            hint="measure them: megatron-dynapipe profile",
        )
    shape = given_numbers(args)
    if "vocabulary" not in shape and (folder := args.data or (found.data if found is not None else None)) is not None:
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
    """What a file says of a model.

    Raises:
        ConfigError: it cannot be read, is neither of the two kinds, or lacks a size.
    """
    try:
        loaded = yaml.safe_load(read_bounded(path, most_bytes=MOST_BYTES).decode())  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"cannot read the model's configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"expected {path} to be YAML or JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected {path} to be a mapping, got {type(loaded).__name__}")
    given = _Given({str(name): value for name, value in loaded.items()}, path)
    return _of_hugging_face(given) if "model_type" in given.values else _of_run_file(given)


class _Given:
    """The entries of a file."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def number(self, *names: str) -> int:
        """The first of the names that has a value; raises ConfigError where none has."""
        found = self.optional(*names)
        if found is None:
            raise ConfigError(
                f"{self.path}: expected {' or '.join(names)}, found none of them",
                hint="give a run file such as those in configs/, a config.json of HuggingFace, or the sizes by flags",
            )
        return found

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


def _of_run_file(given: _Given) -> ModelFile:
    hidden = given.number("hidden-size")
    shape = _run_shape(given, hidden)
    unknown = [name for name in _NOT_MODELLED if given.is_set(name) and str(given.values[name]) != "1"]
    common: dict[str, Any] = {"hidden_size": hidden, "shape": shape, "obstacle": ", ".join(unknown)}
    if (folder := given.values.get("dynapipe-data")) and Path(folder).is_dir():
        common["data"] = Path(folder)
    if "encoder-num-layers" in given.values or "decoder-num-layers" in given.values:
        return ModelFile(
            model=T5,
            encoder_layers=given.number("encoder-num-layers", "num-layers"),
            decoder_layers=given.number("decoder-num-layers", "num-layers"),
            max_seq_len=_length(given, "seq-length", 0),
            max_target_len=_length(given, "decoder-seq-length", -target_positions(T5, 0)),
            **common,
        )
    # n tokens train n - 1 positions
    return ModelFile(
        model=GPT, layers=given.number("num-layers"), max_seq_len=_length(given, "seq-length", 1), **common
    )


def _length(given: _Given, name: str, more: int) -> int | None:
    """The most tokens that fit the positions of a run; None where the file does not say."""
    found = given.optional(name)
    return None if found is None else max(found + more, 1)


def _run_shape(given: _Given, hidden: int) -> dict[str, Any]:
    """Fields of `ModelShape` as Megatron's flags say them, with its defaults."""
    value, gated = given.values.get, given.is_set("swiglu")
    kind = value("position-embedding-type", "learned_absolute")
    local = value("transformer-impl", "transformer_engine") == "local"
    shape: dict[str, Any] = {
        "ffn": given.optional("ffn-hidden-size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden),
        "gated": gated,
        "fused": not given.is_set("no-bias-swiglu-fusion"),
        "rms_norm": value("normalization") == "RMSNorm",
        "biases": not given.is_set("disable-bias-linear"),
        "qkv_bias": given.is_set("add-qkv-bias"),
        "qk_norm": given.is_set("qk-layernorm"),
        "tied": not given.is_set("untie-embeddings-and-output-weights"),
        "rotary": kind == "rope",
        "positions": (given.optional("max-position-embeddings", "seq-length") or 0)
        if kind == "learned_absolute"
        else 0,
        "relative_buckets": (given.optional("relative-attention-num-buckets") or 32) if kind == "relative" else 0,
        "keeps_scores": local and value("dynapipe-attention") == "megatron",
        "attention_dropout": bool(value("attention-dropout", 0.1)),
        "hidden_dropout": bool(value("hidden-dropout", 0.1)),
        "experts": _run_experts(given) if given.is_set("num-experts") else None,
    }
    if (heads := given.optional("num-attention-heads")) is not None:
        shape |= {"heads": heads, "kv_channels": given.optional("kv-channels") or max(1, hidden // heads)}
    if given.is_set("group-query-attention"):
        shape["query_groups"] = given.optional("num-query-groups") or 1
    if (rows := given.optional("padded-vocab-size", "vocab-size")) is not None:
        multiple = 1 if given.is_set("padded-vocab-size") else given.optional("make-vocab-size-divisible-by") or 128
        shape |= {"vocabulary": rows, "vocabulary_multiple": multiple}
    return shape


def _run_experts(given: _Given) -> Experts:
    return Experts(
        count=given.number("num-experts"),
        per_token=given.optional("moe-router-topk") or 2,
        ffn=given.number("moe-ffn-hidden-size", "ffn-hidden-size"),
        shared_ffn=given.optional("moe-shared-expert-intermediate-size") or 0,
        layers=_expert_layers(given),
    )


def _expert_layers(given: _Given) -> tuple[int, ...]:
    """Those with experts: every n-th from the first on, or a list like ([0]*1+[1]*3)*2, as Megatron's flag."""
    frequency, layers = given.values.get("moe-layer-freq", 1), given.number("num-layers")
    if isinstance(frequency, str) and frequency.isdecimal():
        frequency = int(frequency)
    if isinstance(frequency, int) and frequency > 0:
        return _unless_all(range(0, layers, frequency), layers)
    pattern = _pattern(frequency) if isinstance(frequency, str) else frequency
    if not isinstance(pattern, list) or len(pattern) != layers or not any(pattern):
        raise ConfigError(f"{given.path}: moe-layer-freq: expected a number or a list of {layers}, got {frequency!r}")
    return _unless_all([layer for layer, has in enumerate(pattern) if has], layers)


def _unless_all(sparse: Sequence[int], layers: int) -> tuple[int, ...]:
    return () if len(sparse) == layers else tuple(sparse)


def _pattern(text: str) -> object:
    """What lists of numbers, added and multiplied, come to; None where it is something else."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)) if 0 <= number <= _MOST_LAYERS:
                return number
            case ast.List(elts=elements):
                return [value(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=ast.List() | ast.BinOp() as left, op=ast.Mult(), right=ast.Constant() as right):
                return (value(left) * value(right))[:_MOST_LAYERS]
        raise TypeError

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        return None


def _of_hugging_face(given: _Given) -> ModelFile:
    hidden, kind = given.number(*_HIDDEN), str(given.values["model_type"])
    obstacle, shape = _unknown(given, kind), {}
    if not obstacle:
        readers: Mapping[str, Callable[[_Given, int], dict[str, Any]]] = {"gpt2": _gpt2, **dict.fromkeys(_T5_LIKE, _t5)}
        shape = readers.get(kind, _llama)(given, hidden) | {"attention_dropout": False, "hidden_dropout": False}
        shape |= {"keeps_scores": False}
        if (rows := given.optional("vocab_size")) is not None:
            shape |= {"vocabulary": rows, "vocabulary_multiple": 128}
        shape = {name: value for name, value in shape.items() if value is not None}
    common: dict[str, Any] = {"hidden_size": hidden, "shape": shape, "obstacle": obstacle}
    if given.values.get("is_encoder_decoder") or kind in (*_T5_LIKE, "umt5"):
        encoder, decoder = given.number(*_ENCODER), given.number(*_DECODER)
        return ModelFile(model=T5, encoder_layers=encoder, decoder_layers=decoder, **common)
    return ModelFile(model=GPT, layers=given.number(*_LAYERS), **common)


def _unknown(given: _Given, kind: str) -> str:
    """What of a model computed costs do not know."""
    if kind not in _COUNTED:
        return f"a model of type {kind} (known: {', '.join(_COUNTED)})"
    window, positions = given.values.get("sliding_window"), given.values.get("max_position_embeddings", 0)
    used = given.values.get("use_sliding_window", kind in ("mistral", "mixtral"))
    return f"sliding_window {window}" if used and window is not None and window < positions else ""


def _gpt2(given: _Given, hidden: int) -> dict[str, Any]:
    heads = given.optional("n_head")
    return {
        "heads": heads,
        "kv_channels": hidden // heads if heads else None,
        "ffn": given.optional("n_inner") or 4 * hidden,
        "positions": given.optional("n_positions") or 1024,
        "tied": given.values.get("tie_word_embeddings", True),
    }


def _llama(given: _Given, hidden: int) -> dict[str, Any]:
    kind, heads = str(given.values["model_type"]), given.optional("num_attention_heads")
    return {
        "heads": heads,
        "query_groups": given.optional("num_key_value_heads"),
        "kv_channels": given.optional("head_dim") or (hidden // heads if heads else None),
        "ffn": given.optional("intermediate_size"),
        "gated": True,
        "rms_norm": True,
        "biases": False,
        "qkv_bias": kind.startswith("qwen2") or bool(given.values.get("attention_bias")),
        "qk_norm": kind.startswith("qwen3"),
        "rotary": True,
        "tied": bool(given.values.get("tie_word_embeddings", False)),
        "experts": _experts(given),
    }


def _experts(given: _Given) -> Experts | None:
    count = given.optional("num_local_experts", "num_experts")
    if count is None:
        return None
    step, dense = given.optional("decoder_sparse_step") or 1, given.values.get("mlp_only_layers") or []
    layers = given.number(*_LAYERS)
    sparse = [layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense]
    if not sparse:
        return None
    return Experts(
        count=count,
        per_token=given.number("num_experts_per_tok"),
        ffn=given.number("moe_intermediate_size", "intermediate_size"),
        layers=_unless_all(sparse, layers),
    )


def _t5(given: _Given, _hidden: int) -> dict[str, Any]:
    return {
        "heads": given.optional("num_heads"),
        "kv_channels": given.optional("d_kv"),
        "ffn": given.optional("d_ff"),
        "gated": str(given.values.get("feed_forward_proj", "relu")).startswith("gated"),
        "rms_norm": True,
        "biases": False,
        "relative_buckets": given.optional("relative_attention_num_buckets") or 32,
        "tied": given.values.get("tie_word_embeddings", given.values["model_type"] == "t5"),
    }
