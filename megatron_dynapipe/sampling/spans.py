"""Parts of inputs that are to be learned besides targets: earlier turns of an assistant, in a file beside lengths."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import read_bounded

_MOST_BYTES = 2**36


def spans_path(prefix: Path) -> Path:
    """Where a split keeps parts of inputs that are to be learned, too: int64[m, 3], (sample, first, end)."""
    return prefix.with_name(prefix.name + ".spans.npy")


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """Parts of inputs that are to be learned besides targets.

    Attributes:
        rows: int64[m, 3], (sample, first, end), samples in rising order.
    """

    rows: npt.NDArray[np.int64]

    @classmethod
    def read(cls, prefix: Path) -> Self:
        """The spans of a split; none where it has none.

        Raises:
            DataError: the file cannot be read, or is not of this form.
        """
        path = spans_path(prefix)
        if not path.exists():
            return cls(np.empty((0, 3), np.int64))
        try:
            rows = np.lib.format.read_array(io.BytesIO(read_bounded(path, most_bytes=_MOST_BYTES)), allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python's own syntax, which fails in many ways
            raise DataError(f"{path}: expected int64[m, 3], cannot read it: {error}") from error
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != 3:
            raise DataError(f"{path}: expected int64[m, 3], got {rows.dtype}{list(rows.shape)}")
        if (np.diff(rows[:, 0]) < 0).any() or (rows[:, 1] < 0).any() or (rows[:, 1] >= rows[:, 2]).any():
            raise DataError(f"{path}: expected ranges of samples in rising order, got others")
        return cls(rows)

    def tokens(self, samples: int) -> npt.NDArray[np.int64]:
        """How many tokens of each sample's input that is, of so many samples."""
        ids, first, end = self.rows.T
        return np.bincount(ids, end - first, samples)[:samples].astype(np.int64)

    def of(self, sample: int) -> list[tuple[int, int]]:
        """The parts (first, end) of a sample's input."""
        first, stop = np.searchsorted(self.rows[:, 0], [sample, sample + 1])
        return [(int(start), int(end)) for _, start, end in self.rows[first:stop]]
