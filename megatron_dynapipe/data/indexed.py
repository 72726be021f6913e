"""Reading (input, target) samples in Megatron's indexed-dataset format, with numpy; `sampling.lengths` reads the index.

Each sample is one document of two sequences. `data.writing` writes them.
"""

import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.identity import checksums_path
from megatron_dynapipe.sampling.lengths import LengthTable, data_path, read_array, read_ends, read_index

LOOK_S = 1.0
"""Between two looks at whether a file without checksums has been changed."""


class IndexedReader:
    """The samples of one split, memory-mapped; checked when opened.

    Args:
        prefix: path of `<prefix>.bin` and `<prefix>.idx` without their endings.
        family: the models that are to read them, as in `LengthTable.read`; None for samples as they are stored.

    Each sample is checked against its checksum when it is read; where the dataset has none, the file must not change.

    Attributes:
        lengths: tokens of every sample.
        dtype: type of a token on disk.

    Raises:
        DataError: files are missing, damaged, or do not hold (input, target) pairs.
    """

    def __init__(self, prefix: Path, family: ModelFamily | None = None) -> None:
        index = read_index(prefix)
        self.lengths = self._stored = LengthTable.from_index(index)
        if family is not None and (ends := read_ends(prefix, len(self.lengths))) is not None:
            self.lengths = self._stored.of_family(family, ends)
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
        start = int(self._starts[2 * sample])
        middle = int(self._starts[2 * sample + 1])
        end = middle + int(self._stored.target[sample])
        if self._checksums is None:
            self._check_unchanged()
        elif zlib.crc32(self._tokens[start:end]) != self._checksums[sample]:
            raise DataError(
                f"{self._path}: the tokens of sample {sample} are not those that were written (their checksum differs)",
                hint="the file was overwritten or damaged: copy the dataset again; `data verify` checks all of it",
            )
        inputs = int(self.lengths.input[sample])
        targets = int(self.lengths.target[sample])
        return self._tokens[start : start + inputs], self._tokens[middle : middle + targets]

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
