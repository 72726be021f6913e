"""`meta.json` of a dataset folder, and opening a split of one.

<folder>/meta.json                             what the folder holds (`DatasetMeta`)
         tokenizer/                            a HuggingFace tokenizer
         {train,valid,test}.bin, .idx          tokens: one document of two sequences (input, target) per sample
         {train,valid,test}.tasks.npy          int16[samples], each sample's index in `DatasetMeta.tasks`
         {train,valid,test}.crc32.npy          uint32[samples], each sample's checksum (may be absent)
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.indexed import IndexedReader
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import read_bounded

FORMAT: Literal["dynapipe-dataset/1"] = "dynapipe-dataset/1"
SPLITS = ("train", "valid", "test")
TOKENIZER_FOLDER = "tokenizer"

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class DatasetMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a dataset folder holds.

    Attributes:
        format: name and version of this form.
        source: where the text came from, in words.
        tasks: names; a sample's task is an index into these.
        samples: samples of each split.
        vocabulary_size: token ids are smaller than this.
        pad_id: fills micro-batches up to their shape.
        bos_id: starts every decoder input.
        eos_id: ends every target.
        max_input_length: no input has more tokens than this.
        max_target_length: no target has more tokens than this, without start and end tokens.
        tokenizer: the tokenizer's folder, relative to the dataset's.
        files: digests of the splits' files; empty in datasets that were made before there were any.
    """

    format: Literal["dynapipe-dataset/1"]
    source: str
    tasks: tuple[str, ...]
    samples: dict[str, Count]
    vocabulary_size: Positive
    pad_id: Count
    bos_id: Count
    eos_id: Count
    max_input_length: Positive
    max_target_length: Positive
    tokenizer: str = TOKENIZER_FOLDER
    files: dict[str, FileDigests] = {}

    def __post_init__(self) -> None:
        if set(self.samples) != set(SPLITS):
            raise ValueError(f"expected samples of {', '.join(SPLITS)}, got {', '.join(sorted(self.samples))}")


def meta_path(folder: Path) -> Path:
    """Where a dataset folder describes itself."""
    return folder / "meta.json"


def write_meta(folder: Path, meta: DatasetMeta) -> None:
    """Write `meta.json`, readable by people."""
    meta_path(folder).write_bytes(msgspec.json.format(msgspec.json.encode(meta), indent=1) + b"\n")


def read_meta(folder: Path) -> DatasetMeta:
    """Read and check a dataset folder's `meta.json`.

    Raises:
        DataError: the folder or the file is missing, or not of this form; the message names the field.
    """
    hint = "make a dataset with `megatron-dynapipe data prepare` or `megatron-dynapipe data demo`"
    if not folder.is_dir():
        raise DataError(f"expected a dataset folder at {folder}, found none", hint=hint)
    try:
        return msgspec.json.decode(read_bounded(meta_path(folder)), type=DatasetMeta)
    except FileNotFoundError:
        raise DataError(
            f"expected a dataset folder with a meta.json at {folder}, found no such file", hint=hint
        ) from None
    except OSError as error:
        raise DataError(f"{meta_path(folder)}: cannot read it: {error.strerror}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{meta_path(folder)}: expected {FORMAT}: {error}", hint=hint) from error


def open_split(folder: Path, split: str) -> IndexedReader:
    """Open a split of a dataset folder, checked against its `meta.json`.

    Raises:
        DataError: anything is missing or damaged, or the two disagree.
    """
    meta = read_meta(folder)
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)}, got {split!r}")
    reader = IndexedReader(folder / split)
    expected = meta.samples[split]
    if len(reader) != expected:
        raise DataError(
            f"{folder / split}: expected {expected} samples as {meta_path(folder).name} says, got {len(reader)}",
            hint="the folder mixes files of two datasets; prepare it again",
        )
    return reader
