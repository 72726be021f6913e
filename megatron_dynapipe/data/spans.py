"""Which tokens of a decoder-only sequence are to be learned, and which are left of one that is too long.

input, target        s s u u A A u u | A A A      A: turns of the assistant; the last one is the target
loss on everything   . 1 1 1 1 1 1 1   1 1 1      the first token is predicted by nothing
loss on targets      . 0 0 0 1 1 0 0   1 1 1
"""

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling import SpanTable
from megatron_dynapipe.sampling.long_samples import TruncationSide, kept_ranges


class LossOn(enum.StrEnum):
    """The tokens of a decoder-only sample that count: those of the target (and of earlier turns), or all."""

    TARGETS = "targets"
    EVERYTHING = "everything"


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
