"""Parts of inputs that are learned as targets are: an assistant's earlier turns, in a file next to the lengths."""

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.files import read_bounded

Ints = npt.NDArray[np.int64]

_MOST_BYTES = 2**36


def spans_path(prefix: Path) -> Path:
    """The file in which a split keeps parts of inputs that are learned, too: int64[m, 3], (sample, first, end)."""
    return prefix.with_name(prefix.name + ".spans.npy")


_PLACES = 2**32
"""More than a sample has tokens, so that sample · _PLACES + place rises along the table."""


@dataclass(frozen=True, eq=False)
class SpanTable:
    """Parts of inputs that are learned in addition to targets.

    Attributes:
        rows: int64[m, 3], (sample, first, end), in rising order, a sample's parts one behind another.
    """

    rows: npt.NDArray[np.int64]

    @classmethod
    def empty(cls) -> Self:
        """No parts of any input."""
        return cls(np.empty((0, 3), np.int64))

    @classmethod
    def read(cls, prefix: Path) -> Self:
        """The spans of a split; none where it has none.

        Raises:
            DataError: the file cannot be read, or is not of this form.
        """
        path = spans_path(prefix)
        if not path.exists():
            return cls.empty()
        try:
            rows = np.lib.format.read_array(io.BytesIO(read_bounded(path, most_bytes=_MOST_BYTES)), allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python's own syntax, which fails in many ways
            raise DataError(f"{path}: expected int64[m, 3], cannot read it: {error}") from error
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != 3:
            raise DataError(f"{path}: expected int64[m, 3], got {rows.dtype}{list(rows.shape)}")
        same = rows[1:, 0] == rows[:-1, 0]
        rises = (np.diff(rows[:, 0]) >= 0).all() and (rows[1:, 1] >= rows[:-1, 2])[same].all()
        if not rises or (rows[:, :2] < 0).any() or (rows[:, 1] >= rows[:, 2]).any() or (rows[:, 2] >= _PLACES).any():
            raise DataError(f"{path}: expected ranges of samples in rising order, got others")
        return cls(rows)

    def of(self, sample: int) -> list[tuple[int, int]]:
        """The parts (first, end) of a sample's input."""
        first, stop = np.searchsorted(self.rows[:, 0], [sample, sample + 1])
        return [(int(start), int(end)) for _, start, end in self.rows[first:stop]]

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return int(self._sums[-1])

    def check(self, inputs: npt.NDArray[Any]) -> None:
        """Raise a DataError where a part is not within an input of a split, from the tokens of all its inputs."""
        if len(self.rows) and int(self.rows[-1, 0]) >= len(inputs):
            raise DataError(f"expected learned parts of {len(inputs)} samples, got one of sample {self.rows[-1, 0]}")
        outside = np.flatnonzero(self.rows[:, 2] > inputs[self.rows[:, 0]])
        if outside.size:
            sample, first, end = self.rows[outside[0]]
            raise DataError(
                f"expected learned parts within the {inputs[sample]} tokens of sample {sample}'s input, got {first} to"
                f" {end}",
                hint="the folder mixes files of two datasets; prepare it again",
            )

    def tokens_before(self, ids: Ints, places: Ints) -> Ints:
        """Tokens of these parts that lie before a place of each sample's input: int64[n]."""
        first = np.searchsorted(self.rows[:, 0], ids)
        ended = np.searchsorted(self._ends, ids * _PLACES + places, side="right")
        sample, start, _ = self._next[ended].T
        begun = np.where(sample == ids, np.maximum(places - start, 0), 0)
        tokens: Ints = self._sums[ended] - self._sums[first] + begun
        return tokens

    def end_from(self, ids: Ints, places: Ints) -> Ints:
        """The end of the first part that ends at a place of each sample's input, or after it; -1 if there is none."""
        sample, _, end = self._next[np.searchsorted(self._ends, ids * _PLACES + places)].T
        return np.where(sample == ids, end, -1)

    @cached_property
    def _ends(self) -> Ints:
        return self.rows[:, 0] * _PLACES + self.rows[:, 2]

    @cached_property
    def _sums(self) -> Ints:
        """Tokens of all parts before each, and of all."""
        return np.concatenate([[0], np.cumsum(self.rows[:, 2] - self.rows[:, 1])])

    @cached_property
    def _next(self) -> Ints:
        """The parts, and after the last a row that is no sample's."""
        return np.concatenate([self.rows, [[-1, 0, 0]]])
