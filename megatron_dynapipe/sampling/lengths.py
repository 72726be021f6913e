"""The lengths of a split's samples, read without opening its text: from the index (`.idx`) of Megatron's format.

    9 bytes   magic "MMIDIDX\\0\\0"
    u64       version, 1
    u8        code of the tokens' type in the data file (`.bin`)
    u64       n, number of sequences
    u64       d, number of document boundaries (documents + 1)
    int32[n]  tokens of each sequence
    int64[n]  byte offset of each sequence in the data file
    int64[d]  index of the first sequence of each document, and n

Everything is little-endian. The layout is that of `megatron/core/datasets/indexed_dataset.py`, which opens a
truncated data file without complaint; here sizes and offsets are checked.
"""

import io
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.files import read_bounded

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type code, number of sequences, number of document boundaries."""

DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2",
    }.items()
}  # fmt: skip
"""Megatron's numbers of token types; of these, datasets of text use 4 (int32) and 8 (uint16)."""

_MAPPED_BYTES = 2**28
"""A larger index stays on the disk: every process of a node shares its pages."""
_AT_ONCE = 2**16
_MADE_BY = "make the dataset again with `megatron-dynapipe data prepare` (or `data demo`)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexFile:
    """The index of one split, checked.

    Attributes:
        prefix: path of the pair of files without `.bin` and `.idx`.
        dtype: type of a token in the data file.
        sequence_lengths: int32[n], tokens of each sequence.
        sequence_pointers: int64[n], byte offset of each sequence in the data file.
        document_index: int64[d], first sequence of each document, then n.
    """

    prefix: Path
    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]
    sequence_pointers: npt.NDArray[np.int64]
    document_index: npt.NDArray[np.int64]


def index_path(prefix: Path) -> Path:
    """Path of the index file of a dataset prefix."""
    return prefix.with_name(prefix.name + ".idx")


def data_path(prefix: Path) -> Path:
    """Path of the data file of a dataset prefix."""
    return prefix.with_name(prefix.name + ".bin")


def read_index(prefix: Path) -> IndexFile:
    """Read and check the index of `prefix`, and the size of its data file.

    Raises:
        DataError: a file is missing, not of this format, or of another size than the index says.
    """
    for path in (index_path(prefix), data_path(prefix)):
        if not path.parent.is_dir():
            raise DataError(f"expected a dataset folder at {path.parent}, found none", hint=_MADE_BY)
        if not path.is_file():
            raise DataError(f"expected the dataset file {path}, found none", hint=_MADE_BY)
    try:
        content: bytes | npt.NDArray[np.uint8]
        if index_path(prefix).stat().st_size > _MAPPED_BYTES:
            content = np.memmap(index_path(prefix), np.uint8, mode="r")
        else:
            content = read_bounded(index_path(prefix), most_bytes=_MAPPED_BYTES)
    except OSError as error:
        raise DataError(f"{index_path(prefix)}: cannot read it: {error.strerror}") from error
    index = _parse_index(prefix, content)
    _check_offsets(index)
    return index


def _parse_index(prefix: Path, content: bytes | npt.NDArray[np.uint8]) -> IndexFile:
    """LayerSplit the bytes of an index file into its arrays; refuse any that are not exactly one index."""
    path = index_path(prefix)
    if len(content) < HEADER.size:
        raise DataError(f"{path}: expected at least {HEADER.size} bytes, got {len(content)}", hint=_MADE_BY)
    magic, version, code, sequences, boundaries = HEADER.unpack(bytes(content[: HEADER.size]))
    if magic != MAGIC:
        raise DataError(
            f"{path}: expected the magic {MAGIC!r}, got {magic!r}",
            hint="this is not a Megatron indexed dataset",
        )
    if version != VERSION:
        raise DataError(f"{path}: expected index version {VERSION}, got {version}", hint=_MADE_BY)
    if code not in DTYPES:
        raise DataError(f"{path}: expected a token type code in 1…{max(DTYPES)}, got {code}", hint=_MADE_BY)
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if len(content) != expected:
        raise DataError(
            f"{path}: expected {expected} bytes for {sequences} sequences and {boundaries} document boundaries,"
            f" got {len(content)}",
            hint=_MADE_BY,
        )
    pointers_at = HEADER.size + 4 * sequences
    return IndexFile(
        prefix=prefix,
        dtype=DTYPES[code],
        sequence_lengths=np.frombuffer(content, "<i4", sequences, HEADER.size),
        sequence_pointers=np.frombuffer(content, "<i8", sequences, pointers_at),
        document_index=np.frombuffer(content, "<i8", boundaries, pointers_at + 8 * sequences),
    )


def _check_offsets(index: IndexFile) -> None:
    """Sequences lie back to back in the data file, and it is as long as they are together."""
    path = index_path(index.prefix)
    size = index.dtype.itemsize
    expected = 0
    for first in range(0, len(index.sequence_lengths), _AT_ONCE):
        lengths = index.sequence_lengths[first : first + _AT_ONCE]
        if int(lengths.min()) < 0:
            at = int(np.argmin(lengths))
            raise DataError(f"{path}: expected lengths of at least 0, sequence {first + at} has {lengths[at]}")
        ends = expected + np.cumsum(lengths, dtype=np.int64) * size
        starts = ends - lengths.astype(np.int64) * size
        pointers = index.sequence_pointers[first : first + _AT_ONCE]
        if not np.array_equal(starts, pointers):
            at = int(np.argmax(starts != pointers))
            raise DataError(
                f"{path}: expected sequence {first + at} at byte {starts[at]} of the data file, the index says"
                f" {pointers[at]}",
                hint=_MADE_BY,
            )
        expected = int(ends[-1])
    actual = data_path(index.prefix).stat().st_size
    if actual != expected:
        raise DataError(
            f"{data_path(index.prefix)}: expected {expected} bytes as its index says, got {actual}",
            hint="the file was truncated or belongs to another index; copy it again, or " + _MADE_BY,
        )


_HEADER_BYTES = 70_000
"""The longest header of an array file, and its magic."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthTable:
    """Tokens of every sample of one split; the row is the sample's id.

    Attributes:
        input: int32[n], tokens of each input, at least 1.
        target: int32[n], tokens of each target, at least 1.
    """

    input: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.input.ndim != 1 or self.input.shape != self.target.shape:
            raise DataError(
                f"expected one input and one target length per sample, got arrays of shapes {self.input.shape}"
                f" and {self.target.shape}"
            )
        for name, lengths in (("input", self.input), ("target", self.target)):
            if len(lengths) and int(lengths.min()) < 1:
                empty = np.flatnonzero(lengths < 1)
                raise DataError(
                    f"expected every {name} to have at least 1 token, sample {empty[0]} has {lengths[empty[0]]}"
                    f" ({empty.size} such samples)",
                    hint=f"leave samples with an empty {name} out of the dataset",
                )

    def __len__(self) -> int:
        return len(self.input)

    @classmethod
    def from_index(cls, index: IndexFile) -> Self:
        """The lengths in a checked index whose documents are (input, target) pairs.

        Raises:
            DataError: the documents are not pairs, or an input or target is empty.
        """
        path = index_path(index.prefix)
        sequences = len(index.sequence_lengths)
        if sequences % 2:
            raise DataError(
                f"{path}: expected an even number of sequences (input, target, input, target, …), got {sequences}",
                hint="write each sample as one document of two sequences",
            )
        if not _in_pairs(index.document_index, sequences):
            documents = len(index.document_index) - 1
            raise DataError(
                f"{path}: expected {sequences // 2} documents of two sequences each, got {documents} documents of"
                f" {sequences} sequences in all",
                hint="write each sample as one document of two sequences",
            )
        try:
            return cls(input=index.sequence_lengths[0::2], target=index.sequence_lengths[1::2])
        except DataError as error:
            raise DataError(f"{path}: {error.message}", hint=error.hint) from None

    @classmethod
    def read(cls, folder: Path, split: str, family: ModelFamily | None = None) -> Self:
        """Read the lengths of `split` ("train", "valid" or "test") of a dataset folder, as a family of models has them.

        Without a family they are as stored. A decoder-only model has inputs without what an encoder alone reads, an
        encoder–decoder targets without the end token that it adds by itself.

        Raises:
            DataError: files are missing, damaged, or do not hold (input, target) pairs.
        """
        table = cls.from_index(read_index(folder / split))
        if family is None or (ends := read_ends(folder / split, len(table))) is None:
            return table
        return table.of_family(family, ends)

    def of_family(self, family: ModelFamily, ends: npt.NDArray[np.uint8]) -> Self:
        """The lengths as a family of models has them, of stored ones; `ends` is uint8[2n], as `read_ends` gives it."""
        if family.is_encoder_decoder:
            return replace(self, target=self.target - ends[1::2])
        return replace(self, input=self.input - ends[0::2]) if ends[0::2].any() else self


def _in_pairs(documents: npt.NDArray[np.int64], sequences: int) -> bool:
    """Whether every document has two sequences."""
    if len(documents) != sequences // 2 + 1:
        return False
    parts = range(0, len(documents), _AT_ONCE)
    pieces = ((documents[first : first + _AT_ONCE], 2 * first) for first in parts)
    return all(np.array_equal(piece, np.arange(start, start + 2 * len(piece), 2)) for piece, start in pieces)


def ends_path(prefix: Path) -> Path:
    """Where a split keeps how many tokens at the end of every input and target one family of models has apart.

    uint8[2n], of an input those that an encoder alone reads, of a target its end token, which a T5 adds by itself: an
    input, a target, an input, …; absent where there are none.
    """
    return prefix.with_name(prefix.name + ".ends.npy")


def read_ends(prefix: Path, samples: int) -> npt.NDArray[np.uint8] | None:
    """What `ends_path` describes; None where there is no such file.

    Raises:
        DataError: the file cannot be read, or holds another number of samples.
    """
    path = ends_path(prefix)
    return np.asarray(read_array(path, np.dtype(np.uint8), 2 * samples), np.uint8) if path.exists() else None


def task_ids_path(folder: Path, split: str) -> Path:
    """Where a dataset folder keeps the task of each sample of a split."""
    return folder / f"{split}.tasks.npy"


def read_task_ids(folder: Path, split: str, samples: int) -> npt.NDArray[np.int16]:
    """Read the task index of each of the `samples` samples of a split: int16[samples].

    Raises:
        DataError: the file is missing, unreadable, or holds another number of samples.
    """
    path = task_ids_path(folder, split)
    ids = read_array(path, np.dtype(np.int16), samples)
    if samples and int(ids.min()) < 0:
        raise DataError(f"{path}: expected task indices of at least 0, got {ids.min()}")
    return np.asarray(ids, dtype=np.int16)


def read_array(path: Path, dtype: np.dtype[Any], samples: int) -> npt.NDArray[Any]:
    """An array file of one number per sample.

    Raises:
        DataError: the file is missing, unreadable, or holds other numbers, or another number of them.
    """
    try:
        content = read_bounded(path, most_bytes=_HEADER_BYTES + dtype.itemsize * samples)
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python's own syntax, which fails in many ways
        raise DataError(f"{path}: expected {dtype}[{samples}], cannot read it: {error}") from error
    if array.dtype != dtype or array.shape != (samples,):
        raise DataError(f"{path}: expected {dtype}[{samples}], got {array.dtype}{list(array.shape)}")
    return np.asarray(array)
