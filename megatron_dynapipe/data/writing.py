"""Writing samples in Megatron's indexed-dataset format, with numpy: the bytes of Megatron's `IndexedDatasetBuilder`.

Each sample is one document of two sequences, input and target; `sampling.lengths` draws the layout of the index.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.sampling.lengths import DTYPES, HEADER, MAGIC, VERSION, index_path

_DOCUMENTS_AT_ONCE = 2**18
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


def write_index(
    prefix: Path,
    dtype: np.dtype[Any],
    samples: int,
    lengths: Callable[[], Iterable[npt.NDArray[np.int32]]],
) -> None:
    """Write the index of a data file whose samples stand one after another.

    Args:
        prefix: path of the two files without their endings.
        dtype: a token's type.
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
