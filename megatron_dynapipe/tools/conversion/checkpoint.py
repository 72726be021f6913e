"""A whole model on one process, and Megatron's distributed checkpoints of it, which any parallel layout can load."""

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.training.global_vars import destroy_global_vars
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.hugging_face import Flags
from megatron_dynapipe.digests import check_digests, write_digests
from megatron_dynapipe.megatron.equip.built import built_stages
from megatron_dynapipe.megatron.flags.checkpoints import RELEASE, TRACKER, newest
from megatron_dynapipe.megatron.profiling.setup import ProfileSetup, prepared


@contextlib.contextmanager
def whole_model(flags: Flags, family: ModelFamily, vocabulary: int, dtype: torch.dtype) -> Iterator[nn.Module]:
    """The model that flags describe, on this one process and its CPU.

    Args:
        flags: the model's, as a run file has them.
        family: kind of model.
        vocabulary: tokens; padded as training pads them.
        dtype: the parameters' type.

    Raises:
        ConfigError: Megatron refuses the flags.
    """
    arguments = [argument for name, value in flags.items() for argument in _as_arguments(name, value)]
    arguments += ["--transformer-impl", "local"]  # on a CPU; checkpoints are the same for all layers
    arguments += {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(dtype, [])
    try:
        with prepared(arguments, family, vocabulary=vocabulary) as setup:
            yield _build(setup).eval()
    finally:  # Megatron's arguments are global: a process that converts several models has each one's in turn
        destroy_global_vars()
        unset_num_microbatches_calculator()


def _as_arguments(name: str, value: str | int | float | bool) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", str(value)]


def _build(setup: ProfileSetup) -> nn.Module:
    model: nn.Module = built_stages(setup.args, setup.family, setup.layout)[0]
    return model.to(setup.dtype)


def save(model: nn.Module, folder: Path) -> None:
    """Write a checkpoint of weights alone, which `--pretrained-checkpoint FOLDER` begins from, into an empty folder.

    Raises:
        OSError, CheckpointException: it cannot be written.
    """
    path = folder / RELEASE
    path.mkdir()
    # Megatron reads these three of any checkpoint; without its arguments, it has none to compare a run's with. By the
    # pattern it tells a HybridModel from a GPT whose keys it would translate.
    state = {"checkpoint_version": 3.0, "iteration": 0, "model": _entries(model)}
    if pattern := getattr(model, "hybrid_layer_pattern", None):
        state["args"] = argparse.Namespace(hybrid_layer_pattern=pattern)
    dist_checkpointing.save(state, str(path))
    write_digests(path)
    (folder / TRACKER).write_text(RELEASE)


def load(model: nn.Module, folder: Path, rows: Mapping[str, int] | None = None) -> Path:
    """Fill a model from the last checkpoint of a folder, of whatever layout saved it; the checkpoint's path.

    Args:
        model: to fill.
        folder: the folder of checkpoints, as `--save` names it.
        rows: how many rows the checkpoint must have of parameters that Megatron pads to a round number.

    Raises:
        ConfigError: there is none, or it is of another model.
        DataError: a file of it has changed since it was saved.
    """
    path = _last(folder)
    check_digests(path)
    _check_rows(path, rows or {})
    with _reading(path):
        loaded = dist_checkpointing.load({"model": _entries(model)}, str(path), validate_access_integrity=False)
    model.load_state_dict(loaded["model"], strict=False)  # entries other than parameters differ between versions
    return path


def has(folder: Path, name: str) -> bool:
    """Whether the last checkpoint of a folder has a parameter of this name; raises as `load`."""
    path = _last(folder)
    return name in _tensors(path)


def _check_rows(path: Path, rows: Mapping[str, int]) -> None:
    """Refuse a smaller vocabulary: reading fills the rows that a checkpoint lacks with zeros, and says nothing."""
    if not rows:
        return
    saved = _tensors(path)
    for name, count in rows.items():
        if name in saved and saved[name].size[0] < count:
            raise ConfigError(
                f"expected {count} rows of {name}, the vocabulary's, got {saved[name].size[0]} in {path}",
                hint="train with the model.yaml that `convert from-hf` wrote, whose padded-vocab-size is the model's;"
                " with --vocabulary-rows it has rows for tokens that were added",
            )


def _tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """What a checkpoint says of each tensor. Megatron's own reader fails in PyTorch 2.15 (`hooks/saved_tensors`)."""
    with _reading(path):
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Megatron's errors of a checkpoint's files, of many kinds, some with every tensor's metadata, as one of ours."""
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise ConfigError(
            f"{path} is not a checkpoint of this model: {type(error).__name__}: {lines[0][:300]}",
            hint="give the configuration of the model that was trained, by --like",
        ) from error


def _last(folder: Path) -> Path:
    path = newest(folder)
    if path is None:
        raise ConfigError(
            f"expected a folder of Megatron's checkpoints, found no {folder / TRACKER}",
            hint="name the folder that was given to --save, not one of its checkpoints",
        )
    if not path.is_dir():
        raise ConfigError(f"expected the checkpoint {path}, which {TRACKER} names, found none")
    return path


def _entries(model: Any) -> Any:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})
