"""What happens to samples longer than the run's maximum lengths."""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.lengths import LengthTable
from megatron_dynapipe.units import ModelFamily

_AT_ONCE = 2**16


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UsableSamples:
    """Samples that a run may draw, and their lengths after truncation, in tokens, looked up as they are needed.

    Attributes:
        table: tokens of every sample.
        family: for decoder-only models the input length is that of the whole sequence, and the target length is 0.
        max_input_length, max_target_length: to which lengths are truncated.
        sample_ids: int64[n] ascending; None where all are usable.
        longest: ids of the samples of the longest input and of the longest target.
    """

    table: LengthTable
    family: ModelFamily
    max_input_length: int
    max_target_length: int
    sample_ids: npt.NDArray[np.int64] | None
    longest: tuple[int, int]

    def __len__(self) -> int:
        return len(self.table) if self.sample_ids is None else len(self.sample_ids)

    def ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of rows of this table."""
        return rows if self.sample_ids is None else self.sample_ids[rows]

    def lengths(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Input and target lengths of samples: int32[n] each."""
        inputs, targets = _lengths(self.family, self.table.input[ids], self.table.target[ids])
        inputs = np.minimum(inputs, self.max_input_length).astype(np.int32)
        return inputs, np.minimum(targets, self.max_target_length).astype(np.int32)


def _lengths(
    family: ModelFamily, inputs: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    if family is ModelFamily.GPT:
        return inputs + targets, np.zeros(len(inputs), np.int32)
    return inputs, targets


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
    `max_target_length` is not used then. Memory does not grow with the samples, unless some are skipped.

    Raises:
        DataError: a sample is too long and the policy is to fail, or no sample is left.
    """
    scan = _Scan(family=family, max_input_length=max_input_length, max_target_length=max_target_length, policy=policy)
    for start in range(0, len(lengths), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        scan.add(start, *_lengths(family, lengths.input[part], lengths.target[part]))
    report = LongSampleReport(
        policy=policy,
        samples=len(lengths),
        long_inputs=scan.long_inputs,
        long_targets=scan.long_targets,
        long_samples=scan.long_samples,
    )
    if scan.first_long is not None and policy is LongSamples.FAIL:
        raise DataError(
            _too_long_message(family, *scan.first_long, max_input_length, max_target_length, report),
            hint="raise the maximum length, or use --dynapipe-long-samples truncate (or skip)",
        )
    usable_samples = UsableSamples(
        table=lengths,
        family=family,
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        sample_ids=np.concatenate(scan.kept).astype(np.int64) if scan.long_samples and scan.kept else None,
        longest=(scan.at_longest[0], scan.at_longest[1]),
    )
    if not len(usable_samples):
        raise DataError(
            f"expected at least 1 usable sample, got 0 of {report.samples} ({report.long_samples} are too long)",
            hint="use another dataset, raise the maximum lengths, or truncate long samples",
        )
    return usable_samples, report


@dataclass(slots=True, kw_only=True)
class _Scan:
    """What is found of samples, piece by piece: how many are too long, the first of them, the longest usable ones."""

    family: ModelFamily
    max_input_length: int
    max_target_length: int
    policy: LongSamples
    long_inputs: int = 0
    long_targets: int = 0
    long_samples: int = 0
    first_long: tuple[int, int, int] | None = None
    kept: list[npt.NDArray[np.int64]] = field(default_factory=list)
    longest: list[int] = field(default_factory=lambda: [-1, -1])
    at_longest: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, start: int, inputs: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Look at the samples from `start` on."""
        long_input = inputs > self.max_input_length
        long_target = targets > self.max_target_length if self.family is ModelFamily.T5 else np.zeros_like(long_input)
        too_long = long_input | long_target
        self.long_inputs += int(long_input.sum())
        self.long_targets += int(long_target.sum())
        self.long_samples += int(too_long.sum())
        if self.first_long is None and too_long.any():
            at = int(np.argmax(too_long))
            self.first_long = start + at, int(inputs[at]), int(targets[at])
        usable = np.ones_like(too_long)
        if self.policy is LongSamples.SKIP:
            usable = ~too_long
            self.kept.append(np.flatnonzero(usable) + start)
        for part, (lengths, most) in enumerate(((inputs, self.max_input_length), (targets, self.max_target_length))):
            clipped = np.where(usable, np.minimum(lengths, most), -1)
            at = int(np.argmax(clipped))
            if clipped[at] > self.longest[part]:
                self.longest[part], self.at_longest[part] = int(clipped[at]), start + at


def _too_long_message(
    family: ModelFamily,
    sample: int,
    input_length: int,
    target_length: int,
    max_input_length: int,
    max_target_length: int,
    report: LongSampleReport,
) -> str:
    """Name the first sample that is too long, its lengths, the maximum, and how many there are."""
    if family is ModelFamily.GPT:
        allowed, found = f"at most {max_input_length} tokens (input and target)", f"{input_length}"
    else:
        allowed = f"at most {max_input_length} input and {max_target_length} target tokens"
        found = f"{input_length} and {target_length}"
    return (
        f"expected samples of {allowed}, sample {sample} has {found}"
        f" ({report.long_samples} of {report.samples} samples are too long)"
    )
