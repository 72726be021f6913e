"""Samples that are longer than the run's maximum lengths: refused, truncated or left out."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.lengths import LengthTable
from megatron_dynapipe.units import ModelFamily

if TYPE_CHECKING:
    from megatron_dynapipe.sampling.sampler import SamplerSettings

_AT_ONCE = 2**16


class LongSamples(enum.StrEnum):
    """The treatment of samples longer than a maximum length: stop, truncate them, or leave them out."""

    FAIL = "fail"
    TRUNCATE = "truncate"
    SKIP = "skip"


class TruncationSide(enum.StrEnum):
    """Where a sample that is too long loses tokens: at its end, at its beginning, or in its middle."""

    RIGHT = "right"
    LEFT = "left"
    MIDDLE = "middle"


def kept_ranges(length: int, kept: int, side: TruncationSide) -> list[tuple[int, int]]:
    """The ranges (first, end) of `length` tokens that stay where `kept` of them do; of the middle's, none is empty."""
    if kept >= length:
        return [(0, length)] if length else []
    if kept == 0:
        return []
    if side is TruncationSide.RIGHT:
        return [(0, kept)]
    if side is TruncationSide.LEFT or kept == 1:
        return [(length - kept, length)] if side is TruncationSide.LEFT else [(0, kept)]
    return [(0, kept - kept // 2), (length - kept // 2, length)]


@dataclass(frozen=True, slots=True)
class LongSampleReport:
    """How many samples were too long, and what became of them.

    Attributes:
        policy: what was done with them.
        samples: samples in the split.
        long_inputs: samples whose input (decoder-only: whole sequence) is over the maximum.
        long_targets: samples whose target is over the maximum.
        long_samples: samples with either.
    """

    policy: LongSamples
    samples: int
    long_inputs: int
    long_targets: int
    long_samples: int

    def __str__(self) -> str:
        if not self.long_samples:
            return f"all {self.samples} samples are within the maximum lengths"
        done = "skipped" if self.policy is LongSamples.SKIP else "truncated"
        return (
            f"{self.long_samples} of {self.samples} samples are longer than the maximum and were {done}"
            f" ({self.long_inputs} inputs, {self.long_targets} targets)"
        )


@dataclass(frozen=True, slots=True, eq=False)
class UsableSamples:
    """Samples that a run may draw, and their lengths after truncation, in tokens, looked up as they are needed.

    Attributes:
        table: tokens of every sample.
        settings: family and maximum lengths: for decoder-only models the input length is that of the whole sequence,
            and the target length is 0.
        sample_ids: int64[n] ascending; None where all are usable.
        longest: ids of the samples of the longest input and of the longest target.
    """

    table: LengthTable
    settings: "SamplerSettings"
    sample_ids: npt.NDArray[np.int64] | None
    longest: Sequence[int]

    def __len__(self) -> int:
        return len(self.table) if self.sample_ids is None else len(self.sample_ids)

    def ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of rows of this table."""
        return rows if self.sample_ids is None else self.sample_ids[rows]

    def lengths(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Input and target lengths of samples: int32[n] each."""
        inputs, targets = _lengths(self.settings.family, self.table.input[ids], self.table.target[ids])
        inputs = np.minimum(inputs, self.settings.max_input_length).astype(np.int32)
        return inputs, np.minimum(targets, self.settings.max_target_length).astype(np.int32)


def _lengths(
    family: ModelFamily, inputs: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    if family is ModelFamily.GPT:
        return inputs + targets, np.zeros(len(inputs), np.int32)
    return inputs, targets


def apply_maximum(lengths: LengthTable, settings: "SamplerSettings") -> tuple[UsableSamples, LongSampleReport]:
    """Apply the maximum lengths (tokens) to every sample, by failing, truncating or skipping.

    A decoder-only sample is its input and target in one sequence, which `max_input_length` bounds;
    `max_target_length` is not used then. Memory does not grow with the samples, unless some are skipped.

    Raises:
        DataError: a sample is too long and the policy is to fail, or no sample is left.
    """
    most, policy = (settings.max_input_length, settings.max_target_length), settings.long_samples
    long = np.zeros(3, np.int64)  # inputs, targets, samples
    first_long: tuple[int, int, int] | None = None
    kept: list[npt.NDArray[np.int64]] = []
    longest, at_longest = [-1, -1], [0, 0]
    for start in range(0, len(lengths), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        both = _lengths(settings.family, lengths.input[rows], lengths.target[rows])
        over = both[0] > most[0], both[1] > most[1]
        too_long = over[0] | over[1]
        long += [over[0].sum(), over[1].sum(), too_long.sum()]
        if first_long is None and too_long.any():
            at = int(np.argmax(too_long))
            first_long = start + at, int(both[0][at]), int(both[1][at])
        usable = np.ones_like(too_long)
        if policy is LongSamples.SKIP:
            usable = ~too_long
            kept.append(np.flatnonzero(usable) + start)
        for part in range(2):
            clipped = np.where(usable, np.minimum(both[part], most[part]), -1)
            at = int(np.argmax(clipped))
            if clipped[at] > longest[part]:
                longest[part], at_longest[part] = int(clipped[at]), start + at
    report = LongSampleReport(policy, len(lengths), *map(int, long))
    if first_long is not None and policy is LongSamples.FAIL:
        raise _too_long(settings, *first_long, report)
    sample_ids = np.concatenate(kept).astype(np.int64) if report.long_samples and kept else None
    usable_samples = UsableSamples(lengths, settings, sample_ids, at_longest)
    if not len(usable_samples):
        raise DataError(
            f"expected at least 1 usable sample, got 0 of {report.samples} ({report.long_samples} are too long)",
            hint="use another dataset, raise the maximum lengths, or truncate long samples",
        )
    return usable_samples, report


def _too_long(settings: "SamplerSettings", sample: int, first: int, second: int, report: LongSampleReport) -> DataError:
    """Name the first sample that is too long, its lengths, the maximum, and how many there are."""
    if settings.family is ModelFamily.GPT:
        allowed, actual = f"{settings.max_input_length} tokens (input and target)", f"{first}"
    else:
        allowed = f"{settings.max_input_length} input and {settings.max_target_length} target tokens"
        actual = f"{first} and {second}"
    return DataError(
        f"expected samples of at most {allowed}, sample {sample} has {actual}"
        f" ({report.long_samples} of {report.samples} samples are too long)",
        hint="raise the maximum length, or use --dynapipe-long-samples truncate (or skip)",
    )
