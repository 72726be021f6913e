"""`--model-config`: a model's kind and sizes from a run file of Megatron's flags or a HuggingFace `config.json`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.units import ModelFamily, target_positions

MOST_BYTES = 10_000_000

# What HuggingFace's configurations call a size, in the order in which they are looked up.
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_ENCODER = ("encoder_layers", "num_layers", "num_hidden_layers")
_DECODER = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A model's kind and sizes; `layers` of a GPT, the other two of a T5.

    Attributes:
        max_seq_len, max_target_len: most tokens of an input (with a GPT, of its target too), and of a target of a T5;
            None where no run file says so.
    """

    model: ModelFamily
    hidden_size: int
    layers: int | None = None
    encoder_layers: int | None = None
    decoder_layers: int | None = None
    max_seq_len: int | None = None
    max_target_len: int | None = None


def take_model_config(args: argparse.Namespace) -> None:
    """Set what the command line leaves open from the file of `--model-config`; raises ConfigError as `read_sizes`."""
    sizes = read_sizes(args.model_config)
    if args.model not in (None, sizes.model):
        raise ConfigError(f"expected a {args.model} model in {args.model_config}, as --model says, got {sizes.model}")
    for name in ("model", "hidden_size", "layers", "encoder_layers", "decoder_layers"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(sizes, name))
    args.run_lengths = (sizes.max_seq_len, sizes.max_target_len)


def read_sizes(path: Path) -> ModelSizes:
    """The sizes in a file.

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
    given = {str(name): value for name, value in loaded.items()}
    return _of_hugging_face(given, path) if "model_type" in given else _of_run_file(given, path)


def _of_run_file(given: Mapping[str, Any], path: Path) -> ModelSizes:
    hidden = _size(given, ("hidden-size",), path)
    if "encoder-num-layers" in given or "decoder-num-layers" in given:
        return ModelSizes(
            model=ModelFamily.T5,
            hidden_size=hidden,
            encoder_layers=_size(given, ("encoder-num-layers", "num-layers"), path),
            decoder_layers=_size(given, ("decoder-num-layers", "num-layers"), path),
            max_seq_len=_length(given, "seq-length", 0, path),
            max_target_len=_length(given, "decoder-seq-length", -target_positions(ModelFamily.T5, 0), path),
        )
    return ModelSizes(
        model=ModelFamily.GPT,
        hidden_size=hidden,
        layers=_size(given, ("num-layers",), path),
        max_seq_len=_length(given, "seq-length", 1, path),  # n tokens train n - 1 positions
    )


def _length(given: Mapping[str, Any], name: str, more: int, path: Path) -> int | None:
    """The most tokens that fit the positions of a run; None where the file does not say."""
    return max(_size(given, (name,), path) + more, 1) if given.get(name) is not None else None


def _of_hugging_face(given: Mapping[str, Any], path: Path) -> ModelSizes:
    hidden = _size(given, _HIDDEN, path)
    if given.get("is_encoder_decoder") or given["model_type"] in ("t5", "mt5", "umt5"):
        encoder, decoder = _size(given, _ENCODER, path), _size(given, _DECODER, path)
        return ModelSizes(model=ModelFamily.T5, hidden_size=hidden, encoder_layers=encoder, decoder_layers=decoder)
    return ModelSizes(model=ModelFamily.GPT, hidden_size=hidden, layers=_size(given, _LAYERS, path))


def _size(given: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    """The first of the names that has a value."""
    for name in names:
        value = given.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
                raise ConfigError(f"{path}: {name}: expected a whole number above 0, got {value!r}")
            return value
    raise ConfigError(
        f"{path}: expected {' or '.join(names)}, found none of them",
        hint="give a run file such as those in configs/, a config.json of HuggingFace, or the sizes by flags",
    )
