"""Writing and reading (input, target) samples in Megatron's indexed-dataset format, with numpy.

Each sample is one document of two sequences. The files are byte for byte those of Megatron's own
`IndexedDatasetBuilder`; `sampling.lengths` draws the layout of the index.
"""

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.identity import checksums_path
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.lengths import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    LengthTable,
    data_path,
    index_path,
    read_array,
    read_index,
)

LOOK_S = 1.0
"""Between two looks at whether a file without checksums has been changed."""
_DOCUMENTS_AT_ONCE = 2**18
_UINT16_VOCABULARY = 65_500
"""Megatron stores vocabularies smaller than this in two bytes per token, others in four."""


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The type in which Megatron stores tokens of a vocabulary of this size."""
    return DTYPES[8] if vocabulary_size < _UINT16_VOCABULARY else DTYPES[4]


def write_samples(prefix: Path, samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocabulary_size: int) -> None:
    """Write (input, target) samples, none of them empty, as `<prefix>.bin` and `<prefix>.idx`, with their checksums."""
    dtype = token_dtype(vocabulary_size)
    pairs = list(samples)
    tokens = [np.asarray([*inputs, *targets], dtype).tobytes() for inputs, targets in pairs]
    data_path(prefix).write_bytes(b"".join(tokens))
    save_array(checksums_path(prefix), np.array([zlib.crc32(sample) for sample in tokens], np.uint32))
    lengths = np.array([len(part) for pair in pairs for part in pair], "<i4")
    write_index(prefix, dtype, len(tokens), lambda: [lengths])


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array file and have it on the disk."""
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Have a file's bytes on the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_index(
    prefix: Path,
    dtype: np.dtype[Any],
    samples: int,
    lengths: Callable[[], Iterable[npt.NDArray[np.int32]]],
) -> None:
    """Write the index of a data file whose samples stand one after another.

    Args:
        prefix: path of the two files without their endings.
        dtype: of a token.
        samples: their number.
        lengths: gives tokens of every input and target in turn, in any number of pieces; called twice.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    with index_path(prefix).open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, code, 2 * samples, samples + 1))
        for piece in lengths():
            index.write(np.ascontiguousarray(piece, "<i4").tobytes())
        start = 0
        for piece in lengths():
            ends = start + np.cumsum(piece, dtype="<i8") * dtype.itemsize
            index.write((ends - piece.astype("<i8") * dtype.itemsize).tobytes())
            start = int(ends[-1]) if len(ends) else start
        for first in range(0, samples + 1, _DOCUMENTS_AT_ONCE):
            last = min(first + _DOCUMENTS_AT_ONCE, samples + 1)
            index.write(np.arange(2 * first, 2 * last, 2, dtype="<i8").tobytes())
        sync(index)


class IndexedReader:
    """The samples of one split, memory-mapped; checked when opened.

    Args:
        prefix: path of `<prefix>.bin` and `<prefix>.idx` without their endings.

    Each sample is checked against its checksum when it is read; where the dataset has none, the file must not change.

    Attributes:
        lengths: tokens of every sample.
        dtype: type of a token on disk.

    Raises:
        DataError: files are missing, damaged, or do not hold (input, target) pairs.
    """

    def __init__(self, prefix: Path) -> None:
        index = read_index(prefix)
        self.lengths = LengthTable.from_index(index)
        self.dtype = index.dtype
        self._path = data_path(prefix)
        # An empty file cannot be mapped.
        self._tokens: npt.NDArray[Any] = (
            np.memmap(self._path, dtype=self.dtype, mode="r") if len(self.lengths) else np.empty(0, self.dtype)
        )
        self._starts = index.sequence_pointers // self.dtype.itemsize
        self._checksums = read_checksums(prefix, len(self.lengths))
        self._stamp = self._looked_at = 0.0
        if self._checksums is None:
            self._stamp = self._path.stat().st_mtime

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Input and target tokens of a sample: two read-only one-dimensional arrays of `dtype`.

        Raises:
            DataError: the split has no such sample, or its tokens are not those that were written.
        """
        if not 0 <= sample < len(self):
            raise DataError(
                f"{self._path}: expected a sample in 0…{len(self) - 1}, got {sample}",
                hint="the plan was made from another dataset, or another split of it",
            )
        start, middle = int(self._starts[2 * sample]), int(self._starts[2 * sample + 1])
        end = middle + int(self.lengths.target[sample])
        if self._checksums is None:
            self._check_unchanged()
        elif zlib.crc32(self._tokens[start:end]) != self._checksums[sample]:
            raise DataError(
                f"{self._path}: the tokens of sample {sample} are not those that were written (their checksum differs)",
                hint="the file was overwritten or damaged: copy the dataset again; `data verify` checks all of it",
            )
        return self._tokens[start:middle], self._tokens[middle:end]

    def _check_unchanged(self) -> None:
        """Without checksums: the file's time of change, looked at now and then, is that of when it was opened."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        if not self._path.exists() or self._path.stat().st_mtime != self._stamp:
            raise DataError(
                f"{self._path}: expected the file as it was opened, it has been changed since",
                hint="give every run a dataset that nobody writes to",
            )


def read_checksums(prefix: Path, samples: int) -> npt.NDArray[np.uint32] | None:
    """The checksum of each sample of a split; None where it has none, as a dataset that Megatron wrote.

    Raises:
        DataError: the file cannot be read, or holds another number of samples.
    """
    path = checksums_path(prefix)
    if not path.exists():
        return None
    sums = read_array(path, np.dtype(np.uint32), samples)
    return np.asarray(sums, dtype=np.uint32)
