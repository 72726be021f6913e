"""What happens to samples longer than the run's maximum lengths."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.lengths import LengthTable
from megatron_dynapipe.units import ModelFamily


class LongSamples(enum.StrEnum):
    """What to do with samples longer than a maximum length: stop, truncate them, or leave them out."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
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


class UsableSamples(NamedTuple):
    """Samples that a run may draw, with their lengths after truncation, in tokens.

    `sample_ids` int64[n] ascending; `input_lengths`, `target_lengths` int32[n]. For decoder-only models the input
    length is that of the whole sequence, and the target length is 0.
    """

    sample_ids: npt.NDArray[np.int64]
    input_lengths: npt.NDArray[np.int32]
    target_lengths: npt.NDArray[np.int32]


def apply_maximum(
    lengths: LengthTable,
    *,
    family: ModelFamily,
    max_input_length: int,
    max_target_length: int,
    policy: LongSamples,
) -> tuple[UsableSamples, LongSampleReport]:
    """Apply the maximum lengths (tokens) to every sample, by failing, truncating or skipping.

    A decoder-only sample is its input and target in one sequence, which `max_input_length` bounds;
    `max_target_length` is not used then.

    Raises:
        DataError: a sample is too long and the policy is to fail, or no sample is left.
    """
    if family is ModelFamily.GPT:
        inputs, targets = lengths.input + lengths.target, np.zeros(len(lengths), np.int32)
    else:
        inputs, targets = lengths.input, lengths.target
    long_input = inputs > max_input_length
    long_target = targets > max_target_length if family is ModelFamily.T5 else np.zeros(len(lengths), np.bool_)
    too_long = long_input | long_target
    report = LongSampleReport(
        policy=policy,
        samples=len(lengths),
        long_inputs=int(long_input.sum()),
        long_targets=int(long_target.sum()),
        long_samples=int(too_long.sum()),
    )
    if report.long_samples and policy is LongSamples.FAIL:
        first = int(np.argmax(too_long))
        raise DataError(_too_long_message(family, first, inputs, targets, max_input_length, max_target_length, report),
                        hint="raise the maximum length, or use --dynapipe-long-samples truncate (or skip)")  # fmt: skip
    kept = ~too_long if policy is LongSamples.SKIP else np.ones(len(lengths), np.bool_)
    usable = UsableSamples(
        sample_ids=np.flatnonzero(kept).astype(np.int64),
        input_lengths=np.minimum(inputs[kept], max_input_length).astype(np.int32),
        target_lengths=np.minimum(targets[kept], max_target_length).astype(np.int32),
    )
    if not usable.sample_ids.size:
        raise DataError(
            f"expected at least 1 usable sample, got 0 of {report.samples} ({report.long_samples} are too long)",
            hint="use another dataset, raise the maximum lengths, or truncate long samples",
        )
    return usable, report


def _too_long_message(
    family: ModelFamily,
    first: int,
    inputs: npt.NDArray[np.int32],
    targets: npt.NDArray[np.int32],
    max_input_length: int,
    max_target_length: int,
    report: LongSampleReport,
) -> str:
    """Name the first sample that is too long, its lengths, the maximum, and how many there are."""
    if family is ModelFamily.GPT:
        allowed, found = f"at most {max_input_length} tokens (input and target)", f"{inputs[first]}"
    else:
        allowed = f"at most {max_input_length} input and {max_target_length} target tokens"
        found = f"{inputs[first]} and {targets[first]}"
    return (
        f"expected samples of {allowed}, sample {first} has {found}"
        f" ({report.long_samples} of {report.samples} samples are too long)"
    )
