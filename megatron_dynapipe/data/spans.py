"""Which tokens of a decoder-only sequence are to be learned, and which are left of one that is too long.

input, target        s s u u A A u u | A A A      A: turns of the assistant; the last one is the target
loss on everything   . 1 1 1 1 1 1 1   1 1 1      the first token is predicted by nothing
loss on targets      . 0 0 0 1 1 0 0   1 1 1
"""

import enum
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.identity import spans_path
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.sampling.long_samples import TruncationSide, kept_ranges

_MOST_BYTES = 2**36


class LossOn(enum.StrEnum):
    """Which tokens of a decoder-only sample count: those of the target (and of earlier turns), or all."""

    TARGETS = "targets"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """Parts of inputs that are to be learned besides targets.

    Attributes:
        rows: int64[m, 3], (sample, first, end), samples in rising order.
    """

    rows: npt.NDArray[np.int64]

    @classmethod
    def read(cls, prefix: Path) -> Self:
        """Those of a split; none where it has none.

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

    def of(self, sample: int) -> list[tuple[int, int]]:
        """The parts (first, end) of a sample's input."""
        first, stop = np.searchsorted(self.rows[:, 0], [sample, sample + 1])
        return [(int(start), int(end)) for _, start, end in self.rows[first:stop]]


def learned(sample: int, inputs: int, targets: int, loss_on: LossOn, spans: SpanTable) -> npt.NDArray[np.float32]:
    """float32[given + wanted], 1 for each token of a decoder-only sequence that is to be learned."""
    if loss_on is LossOn.EVERYTHING:
        return np.ones(inputs + targets, np.float32)
    counts = np.zeros(inputs + targets, np.float32)
    counts[inputs:] = 1
    for first, end in spans.of(sample):
        counts[first : min(end, inputs)] = 1
    return counts


def truncated(values: npt.NDArray[Any], planned: int, side: TruncationSide, what: str, sample: int) -> npt.NDArray[Any]:
    """The `planned` values that stay; a sample that has fewer is not the one that was planned (DataError)."""
    if planned > len(values):
        raise DataError(
            f"expected {planned} {what} of sample {sample} as planned, the dataset has {len(values)}",
            hint="the plan was made from another dataset, or another split of it",
        )
    if planned == len(values):
        return values
    return np.concatenate([values[first:end] for first, end in kept_ranges(len(values), planned, side)])
