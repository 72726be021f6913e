"""Writing samples in Megatron's indexed-dataset format, with numpy: the bytes of Megatron's `IndexedDatasetBuilder`.

Each sample is one document of two sequences, input and target; `sampling.lengths` draws the layout of the index.
"""

import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.identity import checksums_path
from megatron_dynapipe.sampling import spans_path
from megatron_dynapipe.sampling.lengths import DTYPES, HEADER, MAGIC, VERSION, index_path, task_ids_path

_NUMBERS_AT_ONCE = 2**18
_UINT16_VOCABULARY = 65_500
"""Megatron stores vocabularies smaller than this in two bytes per token, others in four."""


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The type in which Megatron stores tokens of a vocabulary of this size."""
    return DTYPES[8] if vocabulary_size < _UINT16_VOCABULARY else DTYPES[4]


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array file and have it on the disk."""
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
        sync(file)


def sync(file: IO[bytes]) -> None:
    """Have a file's bytes on the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_index(prefix: Path, dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> None:
    """Write the index of a data file whose samples stand one after another.

    Args:
        prefix: path of the two files without their endings.
        dtype: a token's type.
        lengths: [samples, 2], tokens of every input and target.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    flat = np.ascontiguousarray(lengths, "<i4").reshape(-1)
    with index_path(prefix).open("wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, code, len(flat), len(lengths) + 1))
        index.write(flat.tobytes())
        start = 0
        for first in range(0, len(flat), _NUMBERS_AT_ONCE):
            ends = start + np.cumsum(flat[first : first + _NUMBERS_AT_ONCE], dtype="<i8") * dtype.itemsize
            index.write(np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes())
            start = ends[-1]
        for first in range(0, len(lengths) + 1, _NUMBERS_AT_ONCE):
            last = min(first + _NUMBERS_AT_ONCE, len(lengths) + 1)
            index.write(np.arange(2 * first, 2 * last, 2, dtype="<i8").tobytes())
        sync(index)


def write_split(
    prefix: Path,
    dtype: np.dtype[Any],
    lengths: npt.NDArray[np.int32],
    tasks: npt.NDArray[np.int16],
    checksums: npt.NDArray[np.uint32],
    spans: npt.NDArray[np.int64],
) -> None:
    """Write what a dataset's split has next to its tokens.

    Args:
        prefix: path of its files without their endings.
        dtype: a token's type.
        lengths: [samples, 2], tokens of every input and target.
        tasks: each sample's index in the manifest's tasks.
        checksums: of each sample's tokens.
        spans: [m, 3], (sample, first, end) of the parts of inputs that are learned, too.
    """
    write_index(prefix, dtype, lengths)
    save_array(task_ids_path(prefix.parent, prefix.name), tasks)
    save_array(checksums_path(prefix), checksums)
    if len(spans):
        save_array(spans_path(prefix), spans)
