"""The `convert` command: HuggingFace's files → a checkpoint and a run file; a checkpoint → HuggingFace's files."""

import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml
from torch import Tensor, nn

from megatron_dynapipe.cost.hugging_face import OF_EXPERTS, T5_LIKE, Flags, family_of
from megatron_dynapipe.data.meta import TOKENIZER_FILES
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.integration.entry.resume_record import NAME, named, newest, read_record
from megatron_dynapipe.outputs import fresh_folder
from megatron_dynapipe.tools.conversion import checkpoint
from megatron_dynapipe.tools.conversion.families import flags, read_config
from megatron_dynapipe.tools.conversion.names import entries
from megatron_dynapipe.tools.conversion.tensors import TensorEntry
from megatron_dynapipe.units import ModelFamily

RUN_FILE = "model.yaml"
CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
_HEADER = """\
# {name} in Megatron's flags. The command trains it from its own weights on the samples in data/mixture; copy it
# without the comment sign. Run files with layout and training go before this one.
#
# {command}
"""
_TRAINING = (
    "--calculate-per-token-loss --global-batch-size 32 --train-iters 1000 --lr 1e-5 --lr-decay-style constant"
    " --log-interval 10 --eval-interval 100 --eval-iters 4"
)


Progress = Callable[[Sequence[TensorEntry]], Iterable[TensorEntry]]
"""Passes entries on, and may show how many."""


def from_hugging_face(source: Path, folder: Path, progress: Progress = iter) -> tuple[Path, str]:
    """Write a checkpoint of the weights in a HuggingFace folder, a run file of the model, and its configuration.

    Returns:
        The run file, `model.yaml`, and the command that trains with it.

    Raises:
        ConfigError: the model cannot be converted, or the folder is not empty.
        CheckpointError: its files cannot be written.
    """
    config = read_config(source)
    described = flags(config)
    family = family_of(config.to_dict())
    theirs = _their_model(config, source)
    tensors = {name: tensor.detach() for name, tensor in published(theirs).items()}
    dtype = next(iter(tensors.values())).dtype
    with checkpoint.whole_model(described, family, config.vocab_size, dtype) as model:
        fill(model, entries(config.model_type, described, config.vocab_size), tensors, progress)
        with fresh_folder(folder) as fresh:
            checkpoint.save(model, fresh)
            shutil.copyfile(source / CONFIG if source.is_dir() else source, fresh / CONFIG)
            (fresh / RUN_FILE).write_text(_run_file(folder, source, described, family))
    return folder / RUN_FILE, training_command(folder, family)


def to_hugging_face(folder: Path, target: Path, like: Path | None, progress: Progress = iter) -> Path:
    """Write the last checkpoint of a folder as HuggingFace's files; the folder of these.

    Args:
        folder: of checkpoints, as `--save` names it.
        target: to be written.
        like: HuggingFace's configuration of the model, a file or a folder, whose tokenizer and settings of generation
            are copied; None: `folder`.
        progress: sees the tensors go by.

    Raises:
        ConfigError: there is no checkpoint or no configuration, they do not go together, or `target` is not empty.
        CheckpointError: its files cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    like = like or folder
    config = read_config(like)
    described = flags(config)
    vocabulary = config.vocab_size
    with checkpoint.whole_model(described, family_of(config.to_dict()), vocabulary, torch.float32) as model:
        divides_scores = _divides_scores(config.model_type, folder)
        table = entries(config.model_type, described, vocabulary, divides_scores=divides_scores)
        checkpoint.load(model, folder, {entry.ours: entry.rows for entry in table if entry.rows})
        tensors = read_out(model, table, progress)
    dtype = config.dtype or torch.float32
    with fresh_folder(target) as fresh:
        save_torch_state_dict({name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}, fresh)
        # As it is: written by transformers, a T5's would read as that of a tied head.
        shutil.copyfile(like / CONFIG if like.is_dir() else like, fresh / CONFIG)
        for name in (*TOKENIZER_FILES, GENERATION):
            if (like / name).is_file():
                shutil.copyfile(like / name, fresh / name)
    return target


def _divides_scores(kind: str, folder: Path) -> bool:
    """Whether a T5's run had Megatron's scale of scores: its record says so, which what was converted does not have."""
    path = newest(folder)
    record = None if kind not in T5_LIKE or path is None else read_record(path / NAME)
    return record is not None and "softmax_scale" not in record.model


def fill(model: nn.Module, table: list[TensorEntry], tensors: Mapping[str, Tensor], progress: Progress = iter) -> None:
    """Give Megatron's model the numbers of HuggingFace's tensors.

    Raises:
        ConfigError: a tensor is missing, or of another shape.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for entry in progress(table):
            if missing := [name for name in entry.theirs if name not in tensors]:
                raise ConfigError(f"expected the tensors {', '.join(missing)}, found none", hint="download it whole")
            parameter = parameters.pop(entry.ours)
            value = entry.join([tensors[name] for name in entry.theirs])
            expected = (entry.rows, *parameter.shape[1:]) if entry.rows else tuple(parameter.shape)
            if tuple(value.shape) != expected:
                raise ConfigError(f"{entry.theirs[0]}: expected the shape {expected}, got {tuple(value.shape)}")
            parameter[: len(value)].copy_(value)
            if entry.rows:
                # Megatron's softmax runs over these rows, too. The exponential of a mean is at most the mean of the
                # exponentials, so P of them add at most P/V to its sum over V tokens. A row of zeros would have the
                # logit 0, and a GPT-2's lie far below.
                parameter[len(value) :] = value.mean(dim=0)
        for name, parameter in parameters.items():
            if name != "output_layer.bias":  # a tied T5's, which starts at zero
                raise ConfigError(
                    f"expected weights for every parameter, found none for {name} {tuple(parameter.shape)}"
                )


def read_out(model: nn.Module, table: list[TensorEntry], progress: Progress = iter) -> dict[str, Tensor]:
    """HuggingFace's tensors of Megatron's model."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for entry in progress(table):
        value = parameters[entry.ours].detach()
        parts = entry.split(value[: entry.rows] if entry.rows else value)
        tensors |= {
            name: part.clone(memory_format=torch.contiguous_format)
            for name, part in zip(entry.theirs, parts, strict=True)
        }
    return tensors


def _their_model(config: Any, source: Path) -> Any:
    """HuggingFace's model with its weights, from safetensors files alone: other files run code when they are read."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    _check_index(source / INDEX)
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
            f"expected {index} to name files beside it, got {named(elsewhere)}", hint="download the model anew"
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
    """Refuse files without some of the model's weights, which `transformers` makes up, or with weights beside them."""
    missing = set(report["missing_keys"])
    hint = "download the model whole; one without its head, or with another task's, cannot be converted"
    if model.config.is_encoder_decoder and model.lm_head.weight is model.shared.weight:
        missing.add("lm_head.weight")  # a T5's, which `transformers` ties where the files have none
        hint = "the T5 was saved with a head tied to its embeddings, as transformers 5 makes one; v1.1's is not"
    shapes = [f"{name} {tuple(got)}, expected {tuple(shape)}" for name, got, shape in report["mismatched_keys"]]
    problems = {"missing": missing, "unexpected": report["unexpected_keys"], "of another shape": shapes}
    if listed := [f"{problem}: {named(sorted(names))}" for problem, names in problems.items() if names]:
        raise ConfigError(
            f"expected every weight of config.json's model in {source}, and no others; {'; '.join(listed)}",
            hint=hint,
        )


def _run_file(folder: Path, source: Path, described: Flags, kind: ModelFamily) -> str:
    header = _HEADER.format(name=source.name, command=training_command(folder, kind))
    return header + yaml.safe_dump(described, sort_keys=False)


def training_command(folder: Path, kind: ModelFamily) -> str:
    """How what was converted is trained, in one line: in a run file each would need a `#`."""
    run = f"{folder}-run"
    command = ["torchrun", "--standalone", "--nproc-per-node", "1", f"pretrain_{kind}_multitask.py"]
    command += ["--dynapipe-config", str(folder / RUN_FILE), "--dynapipe-data", "data/mixture", *_TRAINING.split()]
    command += ["--pretrained-checkpoint", str(folder), "--load", run, "--save", run, "--save-interval", "500"]
    return shlex.join(command)
