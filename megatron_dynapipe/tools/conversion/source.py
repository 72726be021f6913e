"""The weights in a HuggingFace folder, read by `transformers`, and whether they are what its configuration says."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.costing.hugging_face import OF_EXPERTS
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.megatron.supply.same_flags import named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types by their names in files of safetensors."""


def their_model(config: "PreTrainedConfig", source: Path) -> Any:
    """HuggingFace's model with its weights, from safetensors files alone: other files run code when they are read."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    _check_layers(config, source)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model, report = kind.from_pretrained(
            source,
            config=config,
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named by the report, which the error would hide
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read the weights in {source}: {str(error).splitlines()[0]}",
            hint="expected are files of safetensors; others are converted by HuggingFace's save_pretrained",
        ) from error
    _check_complete(model, report, source)
    return model


def _check_index(index: Path) -> None:
    """Refuse an index that names files elsewhere, before any of them is opened."""
    if not index.is_file():
        return
    try:
        files = set(msgspec.json.decode(read_bounded(index), type=_Index).weight_map.values())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {index}: {error}", hint="download it again") from error
    if elsewhere := sorted(name for name in files if Path(name).name != name):
        raise ConfigError(
            f"expected {index} to name files in its own folder, got {named(elsewhere)}", hint="download the model anew"
        )


def _check_layers(config: "PreTrainedConfig", source: Path) -> None:
    """Refuse files with fewer tensors than the model has layers, before it is built."""
    from safetensors import SafetensorError, safe_open

    _check_index(source / INDEX)
    layers = config.num_hidden_layers
    try:
        tensors = 0
        for each in _files(source):
            with safe_open(source / each, framework="pt") as file:
                tensors += len(file.keys())
    except (OSError, SafetensorError):
        return  # which reading them names
    if tensors < layers:
        raise ConfigError(
            f"expected weights of {layers} layers in {source}, as config.json says, found {amount(tensors, 'tensor')}"
        )


class _Index(msgspec.Struct):
    """The file that holds each weight."""

    weight_map: dict[str, str]


def published(model: Any) -> Mapping[str, Tensor]:
    """A model's tensors under the names of its files: `transformers` joins experts when it reads them."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: Mapping[str, Tensor] = model.state_dict()
    return revert_weight_conversion(model, dict(tensors)) if model.config.model_type in OF_EXPERTS else tensors


def _check_complete(model: Any, report: Mapping[str, Any], source: Path) -> None:
    """Refuse files that lack weights, which `transformers` makes up, or have weights that the model lacks."""
    missing = set(report["missing_keys"])
    hint = "download the model whole; one without its head, or with another task's, cannot be converted"
    if model.config.is_encoder_decoder and model.lm_head.weight is model.shared.weight:
        missing.add("lm_head.weight")  # a T5's, which `transformers` ties where the files have none
        hint = (
            "the T5 was saved with a head tied to its embeddings, as transformers 5 makes one; v1.1's is not: add"
            " lm_head.weight = shared.weight / d_model ** 0.5 to its safetensors, and"
            ' "tie_word_embeddings": false to its config.json'
        )
    shapes = [f"{name} {tuple(got)}, expected {tuple(shape)}" for name, got, shape in report["mismatched_keys"]]
    problems = {"missing": missing, "unexpected": report["unexpected_keys"], "of another shape": shapes}
    if listed := [f"{problem}: {named(sorted(names))}" for problem, names in problems.items() if names]:
        raise ConfigError(
            f"expected every weight of config.json's model in {source}, and no others; {'; '.join(listed)}",
            hint=hint,
        )


def is_tied(model: Any) -> bool:
    """Whether a model's head is its embedding, or equal to it; `transformers` ties none that differs."""
    head = model.get_output_embeddings().weight
    words = model.get_input_embeddings().weight
    return head is words or torch.equal(head, words)


def rounded(source: Path, dtype: torch.dtype) -> Iterator[str]:
    """A line where weights in a folder's files lose digits in the type that they are read in."""
    from safetensors import safe_open

    kinds: set[torch.dtype] = set()
    for each in _files(source):
        with safe_open(source / each, framework="pt") as file:
            names = list(file.keys())
            kinds |= {_DTYPES.get(file.get_slice(key).get_dtype(), dtype) for key in names}
    if lost := sorted(_name(kind) for kind in kinds if torch.promote_types(kind, dtype) != dtype):
        yield (
            f"weights are rounded from {' and '.join(lost)} to {_name(dtype)}, the dtype in config.json; with"
            f' "dtype": "{lost[0]}" there they are kept as they are'
        )


def _files(source: Path) -> set[str]:
    """The names of a folder's files of weights."""
    if not (source / INDEX).is_file():
        return {WEIGHTS}
    return set(msgspec.json.decode(read_bounded(source / INDEX), type=_Index).weight_map.values())


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a weight that is no number; raises ConfigError."""
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"{name}: expected finite weights, {int((~torch.isfinite(tensor)).sum())} are not")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
