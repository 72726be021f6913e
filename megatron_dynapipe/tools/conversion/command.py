"""The `convert` command: HuggingFace's files → a checkpoint and a run file; a checkpoint → HuggingFace's files."""

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import yaml
from torch import Tensor, nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.hugging_face import T5_LIKE, Flags, family_of
from megatron_dynapipe.data.meta import TOKENIZER_FILES
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.megatron.entry.resume_record import NAME, ResumeRecord, read_record
from megatron_dynapipe.megatron.flags.checkpoints import newest
from megatron_dynapipe.outputs import fresh_folder
from megatron_dynapipe.tools.conversion import checkpoint
from megatron_dynapipe.tools.conversion.families import UNTIED, flags, read_config
from megatron_dynapipe.tools.conversion.names import HEAD, entries
from megatron_dynapipe.tools.conversion.source import check_finite, is_tied, published, rounded, their_model
from megatron_dynapipe.tools.conversion.tensors import TensorEntry

RUN_FILE, CONFIG, GENERATION = "model.yaml", "config.json", "generation_config.json"
_QUANTIZED = "quantization_config"
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


def from_hugging_face(
    source: Path,
    folder: Path,
    progress: Progress = iter,
    *,
    vocabulary_rows: int | None = None,
    said: Callable[[str], None] = lambda _: None,
) -> tuple[Path, str]:
    """Write a checkpoint of the weights in a HuggingFace folder, a run file of the model, and its configuration.

    Args:
        source: the folder.
        folder: to write.
        progress: sees the tensors go by.
        vocabulary_rows: rows of the embedding and of the head, for tokens that were added; those beyond the model's own
            hold the mean of these.
        said: called with a line for whatever is not as `config.json` says.

    Returns:
        The run file, `model.yaml`, and the command that trains with it.

    Raises:
        ConfigError: the model cannot be converted, or the folder is not empty.
        CheckpointError: its files cannot be written.
    """
    config = read_config(source)
    own = config.vocab_size
    rows = vocabulary_rows or config.vocab_size
    if rows < own:
        raise ConfigError(f"expected --vocabulary-rows of at least the model's {own}, got {rows}")
    described = flags(config, rows)
    family = family_of(config.to_dict())
    theirs = their_model(config, source)
    tensors = {name: tensor.detach() for name, tensor in published(theirs).items()}
    dtype = next(iter(tensors.values())).dtype
    for note in rounded(source, dtype):
        said(note)
    if getattr(config, _QUANTIZED, None):
        name = str(dtype).removeprefix("torch.")
        said(f"weights are quantized: they are converted as {name}, and config.json says so in the checkpoint's folder")
    changes: dict[str, Any] = {} if rows == own else {"vocab_size": rows}
    changes |= _true_type(source, dtype)
    if UNTIED not in described and not is_tied(theirs):
        said("config.json says that the head is the embedding, and the files have another: it is kept, untied")
        described[UNTIED] = True
        changes["tie_word_embeddings"] = False
    with checkpoint.whole_model(described, family, rows, dtype) as model:
        fill(model, entries(config.model_type, described, own), tensors, progress)
        with fresh_folder(folder) as fresh:
            checkpoint.save(model, fresh)
            _write_config(source, fresh, changes)
            (fresh / RUN_FILE).write_text(_run_file(folder, source, described, family))
    return folder / RUN_FILE, training_command(folder, family)


def to_hugging_face(
    folder: Path, target: Path, like: Path | None, progress: Progress = iter, *, vocabulary_rows: int | None = None
) -> Path:
    """Write the last checkpoint of a folder as HuggingFace's files; the folder of these.

    Args:
        folder: the folder of checkpoints, as `--save` names it.
        target: to be written.
        like: HuggingFace's configuration of the model, a file or a folder, whose tokenizer and settings of generation
            are copied; None: `folder`.
        progress: sees the tensors go by.
        vocabulary_rows: rows of the embedding and of the head that are kept; None: the configuration's.

    Raises:
        ConfigError: there is no checkpoint or no configuration, they do not go together, tokens were added that nobody
            says whether to keep, or `target` is not empty.
        CheckpointError: its files cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    if like is None and not (folder / CONFIG).is_file():
        raise ConfigError(
            f"expected {CONFIG} in {folder}, as `convert from-hf` leaves it there, found none",
            hint=f"pass --like FOLDER: a HuggingFace folder or {CONFIG} of such a model",
        )
    like = like or folder
    config = read_config(like)
    record = _record(folder)
    vocabulary = vocabulary_rows or config.vocab_size
    if vocabulary_rows is None and record is not None:
        _check_added(record, vocabulary, like)
    described = flags(config, vocabulary)
    changes = dict[str, Any]()
    if vocabulary != config.vocab_size:
        changes["vocab_size"] = vocabulary
    if UNTIED not in described and checkpoint.has(folder, HEAD):
        described[UNTIED] = True
        changes["tie_word_embeddings"] = False
    with checkpoint.whole_model(described, family_of(config.to_dict()), vocabulary, torch.float32) as model:
        divides_scores = _divides_scores(config.model_type, record)
        table = entries(config.model_type, described, vocabulary, divides_scores=divides_scores)
        checkpoint.load(model, folder, {entry.ours: entry.rows for entry in table if entry.rows})
        tensors = read_out(model, table, progress)
    dtype = config.dtype or torch.float32
    changes |= _true_type(like, dtype)
    with fresh_folder(target) as fresh:
        save_torch_state_dict({name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}, fresh)
        _write_config(like, fresh, changes)
        for name in (*TOKENIZER_FILES, GENERATION):
            if (like / name).is_file():
                shutil.copyfile(like / name, fresh / name)
    return target


def _fields(source: Path) -> dict[str, Any]:
    """Of a configuration's file, or of a folder's."""
    fields: dict[str, Any] = msgspec.json.decode(read_bounded(source / CONFIG if source.is_dir() else source))
    return fields


def _true_type(source: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Changes of a configuration that says another type of the weights than they are written in; none where it does."""
    fields = _fields(source)
    name = str(dtype).removeprefix("torch.")
    said = fields.get("dtype", fields.get("torch_dtype"))
    return {} if said in (None, name) and _QUANTIZED not in fields else {"dtype": name}


def _write_config(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """The configuration as it is, but for some fields: written by transformers, a T5's would say that its head is tied.

    The weights are written as plain numbers, so nothing of a quantization is left.
    """
    fields = _fields(source)
    if not changes and _QUANTIZED not in fields:
        shutil.copyfile(source / CONFIG if source.is_dir() else source, folder / CONFIG)
        return
    fields = {name: value for name, value in {**fields, **changes}.items() if name != _QUANTIZED}
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n")


def _record(folder: Path) -> ResumeRecord | None:
    """What a run says of its last checkpoint; what was converted, and not trained, has no record."""
    path = newest(folder)
    return None if path is None else read_record(path / NAME)


def _check_added(record: ResumeRecord, vocabulary: int, like: Path) -> None:
    """Refuse to leave out rows of tokens that a run had, unless that was asked for."""
    tokens = int(record.model.get("vocabulary_size", 0))
    if tokens > vocabulary:
        raise ConfigError(
            f"expected as many rows as the run's data has tokens, {tokens}, got {vocabulary} by {like}",
            hint=f"--vocabulary-rows {tokens} keeps the rows of added tokens, {vocabulary} leaves them out",
        )


def _divides_scores(kind: str, record: ResumeRecord | None) -> bool:
    """Whether a T5's run had Megatron's scale of scores: its record says so."""
    return kind in T5_LIKE and record is not None and "softmax_scale" not in record.model


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
            for name in entry.theirs:
                check_finite(name, tensors[name])
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
        check_finite(entry.ours, value)
        parts = entry.split(value[: entry.rows] if entry.rows else value)
        tensors |= {
            name: part.clone(memory_format=torch.contiguous_format)
            for name, part in zip(entry.theirs, parts, strict=True)
        }
    return tensors


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
