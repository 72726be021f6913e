"""`manifest.json` of a dataset folder, and opening a split of one.

<folder>/manifest.json                         what the folder holds (`DatasetMeta`)
         tokenizer/                            a HuggingFace tokenizer
         {train,valid,test}.bin, .idx          tokens: one document of two sequences (input, target) per sample
         {train,valid,test}.tasks.npy          int16[samples], each sample's index in `DatasetMeta.tasks`
         {train,valid,test}.crc32.npy          uint32[samples], each sample's checksum (may be absent)
         {train,valid,test}.spans.npy          int64[m, 3], (sample, first, end): parts of inputs to be learned, too,
                                               as earlier turns of a conversation (absent where there are none)
         {train,valid,test}.lost.npy           uint64[samples], a bit for each of the first names in
                                               `DatasetMeta.not_written` that a sample's row has (may be absent)
         {train,valid,test}.ends.npy           uint8[2·samples], of every input and target how many of its last tokens
                                               one family of models has apart (`sampling.lengths.ends_path`)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.identity import FileDigests, fingerprint, manifest_path, names_of
from megatron_dynapipe.data.indexed import IndexedReader
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.sampling import TruncationSide, read_task_ids

FORMAT: Literal["dynapipe-dataset/3"] = "dynapipe-dataset/3"
SPLITS = ("train", "valid", "test")
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
FILES = frozenset(
    {"manifest.json"}
    | {f"{TOKENIZER_FOLDER}/{name}" for name in TOKENIZER_FILES}
    | {path.name for split in SPLITS for path in names_of(Path(), split)}
)
"""Every file that a dataset folder may hold; others in it are the user's."""

_COPY_HINT = "the samples were encoded by another: copy the dataset again, or make it with `data prepare --tokenizer`"

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0)]


class DatasetMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of a dataset folder.

    Attributes:
        format: name and version of this form.
        source: where the text came from, in words.
        tasks: names; a sample's task is an index into these.
        samples: samples of each split, by task.
        read: samples that the sources gave, by task; they are in `samples` or in `skipped`.
        skipped: samples that were left out, by reason.
        truncated: samples that lost tokens, by task.
        not_written: what rows have and their templates do not write, in words, counted.
        rates: how often each task is drawn in training, where not by its size.
        sides: where inputs lose tokens that are too long for a run, by task, if it is not their end.
        loss: which tokens of decoder-only samples count if nothing else is asked for: "targets", what the model will
            have to write itself, or "everything", as in plain text.
        lengths: training samples by the power of two that their input and their target do not exceed.
        vocabulary_size: token ids are smaller than this.
        pad_id: fills micro-batches up to their shape, where it never counts; the end token where a tokenizer has no
            other.
        bos_id: starts the input of an encoder–decoder's decoder.
        eos_id: ends its target; a decoder-only model's is stored with it.
        max_input_length: no input has more tokens than this.
        max_target_length: no target has more tokens than this, without its end token.
        tokenizer: fingerprint of the tokenizer.
        content_hash: hash of all samples, their order and their tokenizer.
        recipe: digest of sources, mixture and settings: equal where preparing again would give the same.
        files: digests of the splits' files; empty in datasets that were made before there were any.
    """

    format: Literal["dynapipe-dataset/3"] = FORMAT
    source: str
    tasks: tuple[str, ...]
    samples: dict[str, dict[str, Count]]
    read: dict[str, Count] = {}
    skipped: dict[str, Count] = {}
    truncated: dict[str, Count] = {}
    not_written: dict[str, Count] = {}
    rates: dict[str, Rate] = {}
    sides: dict[str, TruncationSide] = {}
    loss: Literal["targets", "everything"] = "everything"
    lengths: dict[str, dict[str, Count]] = {}
    vocabulary_size: Positive
    pad_id: Count
    bos_id: Count
    eos_id: Count
    max_input_length: Positive
    max_target_length: Positive
    tokenizer: str = ""
    content_hash: str = ""
    recipe: str = ""
    files: dict[str, FileDigests] = {}

    def __post_init__(self) -> None:
        _check_splits(self.samples)
        if unprintable := [task for task in self.tasks if not task.isprintable()]:
            raise ValueError(f"expected names of tasks of printable characters, got {unprintable[0]!a}")

    @property
    def task_rates(self) -> tuple[float, ...]:
        """How often each task is drawn in training, by its index; empty where by its size."""
        return tuple(self.rates.get(task, 0.0) for task in self.tasks) if self.rates else ()

    @property
    def task_sides(self) -> tuple[TruncationSide, ...]:
        """The side at which inputs lose tokens in training, by index of task; a single one if all tasks share it."""
        sides = tuple(self.sides.get(task, TruncationSide.RIGHT) for task in self.tasks)
        return sides if len(set(sides)) > 1 else sides[:1] or (TruncationSide.RIGHT,)

    @property
    def split_samples(self) -> dict[str, int]:
        """Samples of each split."""
        return {split: sum(self.samples[split].values()) for split in SPLITS}


def _check_splits(samples: Mapping[str, object]) -> None:
    if set(samples) != set(SPLITS):
        raise ValueError(f"expected samples of {', '.join(SPLITS)}, got {', '.join(sorted(samples))}")


def tokenizer_folder(folder: Path) -> Path:
    """Where a dataset folder keeps its tokenizer."""
    return folder / TOKENIZER_FOLDER


def write_meta(folder: Path, meta: DatasetMeta) -> None:
    """Write `manifest.json`, readable by people."""
    manifest_path(folder).write_bytes(msgspec.json.format(msgspec.json.encode(meta), indent=1) + b"\n")


def read_meta(folder: Path) -> DatasetMeta:
    """Read and check a dataset folder's `manifest.json`.

    Raises:
        DataError: the folder or the file is missing, or not of this form; the message names the field.
    """
    hint = "`megatron-dynapipe data prepare` makes one of your samples, `megatron-dynapipe data demo` a small one"
    if not folder.is_dir():
        raise DataError(f"expected a dataset folder at {folder}, found none", hint=hint)
    path = manifest_path(folder)
    try:
        return msgspec.json.decode(read_bounded(path), type=DatasetMeta)
    except FileNotFoundError:
        raise DataError(
            f"expected a dataset folder with a manifest.json at {folder}, found no such file", hint=hint
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot read it: {error.strerror}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: expected {FORMAT}: {error}", hint=hint) from error


def open_split(folder: Path, split: str, family: ModelFamily | None = None) -> IndexedReader:
    """Open a split of a dataset folder, checked against its manifest, as a family of models reads it, or as stored.

    Raises:
        DataError: anything is missing or damaged, or the two disagree.
    """
    meta = read_meta(folder)
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)}, got {split!r}")
    reader = IndexedReader(folder / split, family)
    expected = meta.split_samples[split]
    if len(reader) != expected:
        raise DataError(
            f"{folder / split}: expected {expected} samples as {manifest_path(folder).name} says, got {len(reader)}",
            hint="the folder mixes files of two datasets; prepare it again",
        )
    return reader


def task_ids_of(folder: Path, split: str, samples: int, meta: DatasetMeta) -> npt.NDArray[np.int16]:
    """Each sample's index in the manifest's tasks.

    Raises:
        DataError: the file is missing or damaged, or the manifest has fewer tasks.
    """
    task_ids = read_task_ids(folder, split, samples)
    most = int(task_ids.max(initial=-1)) + 1
    if most > len(meta.tasks):
        raise DataError(f"{manifest_path(folder)}: expected {most} tasks, got {len(meta.tasks)}")
    return task_ids


def check_tokenizer(folder: Path, meta: DatasetMeta) -> None:
    """Raise a DataError where the dataset's tokenizer is not the one that its manifest describes, or is missing."""
    path = tokenizer_folder(folder)
    try:
        actual = fingerprint(path) if meta.tokenizer else ""
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: expected the dataset's tokenizer, cannot read it: {error}", hint=_COPY_HINT
        ) from error
    if actual != meta.tokenizer:
        raise DataError(
            f"{path}: expected the tokenizer that {manifest_path(folder).name} describes (fingerprint"
            f" {meta.tokenizer}), found another (fingerprint {actual})",
            hint=_COPY_HINT,
        )
