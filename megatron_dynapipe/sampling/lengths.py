"""The lengths of a split's samples, read without opening its text."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.sampling.index_file import IndexFile, index_path, read_index

_AT_ONCE = 2**16
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
    def read(cls, folder: Path, split: str) -> Self:
        """Read the lengths of `split` ("train", "valid" or "test") of a dataset folder.

        Raises:
            DataError: files are missing, damaged, or do not hold (input, target) pairs.
        """
        return cls.from_index(read_index(folder / split))


def _in_pairs(documents: npt.NDArray[np.int64], sequences: int) -> bool:
    """Whether every document has two sequences."""
    if len(documents) != sequences // 2 + 1:
        return False
    parts = range(0, len(documents), _AT_ONCE)
    pieces = ((documents[first : first + _AT_ONCE], 2 * first) for first in parts)
    return all(np.array_equal(piece, np.arange(start, start + 2 * len(piece), 2)) for piece, start in pieces)


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
        found = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python's own syntax, which fails in many ways
        raise DataError(f"{path}: expected {dtype}[{samples}], cannot read it: {error}") from error
    if found.dtype != dtype or found.shape != (samples,):
        raise DataError(f"{path}: expected {dtype}[{samples}], got {found.dtype}{list(found.shape)}")
    return np.asarray(found)
