"""Samples that are longer than the run's maximum lengths: refused, truncated or left out."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.sampling.cutting import Cut, Cutter, Ints, TruncationSide
from megatron_dynapipe.sampling.lengths import LengthTable

if TYPE_CHECKING:
    from megatron_dynapipe.sampling.sampler import SamplerSettings

_AT_ONCE = 2**16


class LongSamples(enum.StrEnum):
    """The treatment of samples longer than a maximum length: stop, truncate them, or leave them out."""

    FAIL = "fail"
    TRUNCATE = "truncate"
    SKIP = "skip"


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
        long_samples: samples that are over a maximum length.
        learned: tokens of all samples that are to be learned where targets are: of targets and, of a GPT, of earlier
            answers.
        lost: the ones that are cut off, or that samples have which are left out.
        over_batch: samples that are left and longer than a whole batch may be, where that is bounded in tokens.
    """

    policy: LongSamples
    samples: int
    long_samples: int
    learned: int
    lost: int
    over_batch: int

    def __str__(self) -> str:
        if not self.long_samples:
            return f"all {self.samples} samples are within the maximum lengths"
        done = "skipped" if self.policy is LongSamples.SKIP else "truncated"
        lost = f"{self.lost} of {self.learned} target tokens are lost" if self.lost else "no target token is lost"
        return f"{self.long_samples} of {self.samples} samples are longer than the maximum and were {done}: {lost}"


@dataclass(frozen=True, slots=True, eq=False)
class UsableSamples:
    """Samples that a run may draw, and their lengths after truncation, in tokens, looked up as they are needed.

    Attributes:
        table: tokens of every sample.
        settings: family and maximum lengths: for decoder-only models the input length is that of the whole sequence,
            and the target length is 0.
        cutter: cuts samples that are too long.
        sample_ids: int64[n] ascending; None where all are usable.
        longest: ids of the samples of the longest input and of the longest target.
    """

    table: LengthTable
    settings: "SamplerSettings"
    cutter: Cutter
    sample_ids: npt.NDArray[np.int64] | None = None
    longest: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.table) if self.sample_ids is None else len(self.sample_ids)

    def ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of rows of this table."""
        return rows if self.sample_ids is None else self.sample_ids[rows]

    def lengths(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Input and target lengths of samples: int32[n] each."""
        inputs, targets = self._whole(ids)
        long = np.flatnonzero(self._is_long(inputs, targets))
        if long.size:
            at = ids[long]
            cut = self.cutter.cut(at, self.table.input[at], self.table.target[at], self._most)
            inputs[long], targets[long] = self.cutter.lengths(cut)
        return inputs, targets

    def labels(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Positions of decoder-only samples that count where losses are of targets: int32[n]."""
        inputs = self.table.input[ids]
        cut = self.cutter.cut(ids, inputs, self.table.target[ids], self._most)
        return self.cutter.labels(ids, inputs, cut).astype(np.int32)

    def long(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """For every part of the table: its samples, how many are too long, and how many tokens to learn these lose."""
        skips = self.settings.long_samples is LongSamples.SKIP
        for start in range(0, len(self.table), _AT_ONCE):
            ids = np.arange(start, min(start + _AT_ONCE, len(self.table)))
            long = ids[self._is_long(*self._whole(ids))]
            inputs = self.table.input[long].astype(np.int64)
            targets = self.table.target[long].astype(np.int64)
            lost = self.cutter.learned(long, inputs, Cut(inputs, np.zeros_like(inputs), targets))
            if not skips:
                lost = lost - self.cutter.learned(long, inputs, self.cutter.cut(long, inputs, targets, self._most))
            yield ids, long, lost

    def long_by_task(self, task_ids: npt.NDArray[np.int16]) -> dict[int, tuple[int, int]]:
        """What is too long of each task that has such samples."""
        count = int(task_ids.max(initial=-1)) + 1
        samples = np.zeros(count, np.int64)
        lost = np.zeros(count, np.int64)
        for _, long, lost_of in self.long():
            samples += np.bincount(task_ids[long], minlength=count)
            np.add.at(lost, task_ids[long], lost_of)
        return {int(task): (int(samples[task]), int(lost[task])) for task in np.flatnonzero(samples)}

    @property
    def _most(self) -> tuple[int, int]:
        return self.settings.max_input_length, self.settings.max_target_length

    def _whole(self, ids: Ints) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Lengths before truncation, arrays of their own."""
        inputs = self.table.input[ids]
        targets = self.table.target[ids]
        if self.settings.family.is_encoder_decoder:
            return inputs, targets
        return inputs + targets, np.zeros(len(inputs), np.int32)

    def _is_long(self, inputs: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        is_long: npt.NDArray[np.bool_] = (inputs > self._most[0]) | (targets > self._most[1])
        return is_long


def apply_maximum(
    lengths: LengthTable, settings: "SamplerSettings", cutter: Cutter
) -> tuple[UsableSamples, LongSampleReport]:
    """Apply the maximum lengths (tokens) to every sample, by failing, truncating or skipping.

    A decoder-only sample is its input and target in one sequence, which `max_input_length` bounds;
    `max_target_length` is not used then. Memory does not grow with the samples, unless some are skipped.

    Raises:
        DataError: a sample is too long and the policy is to fail, or no sample is left.
    """
    every = UsableSamples(lengths, settings, cutter)
    samples = lost = over_batch = 0
    most_of_batch = settings.tokens_per_iteration or np.iinfo(np.int64).max
    kept: list[npt.NDArray[np.int64]] = []
    longest = [-1, -1]
    at_longest = [0, 0]
    first_long = None
    for part, long, lost_of in every.long():
        samples = samples + len(long)
        lost = lost + int(lost_of.sum())
        if first_long is None and len(long):
            first_long = int(long[0])
        ids = part
        if settings.long_samples is LongSamples.SKIP:
            ids = np.delete(part, long - part[0])
            kept.append(ids)
        both = every.lengths(ids)
        over_batch += int((both[0].astype(np.int64) + both[1] > most_of_batch).sum())
        for of, values in enumerate(both):
            at = int(np.argmax(values)) if len(ids) else 0
            if len(ids) and values[at] > longest[of]:
                longest[of], at_longest[of] = int(values[at]), int(ids[at])
    learned = cutter.learned_in_all(lengths.target)
    report = LongSampleReport(settings.long_samples, len(lengths), samples, learned, lost, over_batch)
    if first_long is not None and settings.long_samples is LongSamples.FAIL:
        raise _too_long(lengths, settings, first_long, report)
    sample_ids = np.concatenate(kept) if report.long_samples and kept else None
    usable = UsableSamples(lengths, settings, cutter, sample_ids, at_longest)
    if not len(usable):
        raise DataError(
            f"expected at least 1 usable sample, got 0 of {report.samples} ({report.long_samples} are too long)",
            hint="use another dataset, raise the maximum lengths, or truncate long samples",
        )
    return usable, report


def _too_long(lengths: LengthTable, settings: "SamplerSettings", sample: int, report: LongSampleReport) -> DataError:
    """Name the first sample that is too long, its lengths, the maximum, and how many there are."""
    first = int(lengths.input[sample])
    second = int(lengths.target[sample])
    if settings.family.is_encoder_decoder:
        allowed = f"{settings.max_input_length} input and {settings.max_target_length} target tokens"
        actual = f"{first} and {second}"
    else:
        allowed = f"{settings.max_input_length} tokens (input and target)"
        actual = f"{first + second}"
    return DataError(
        f"expected samples of at most {allowed}, sample {sample} has {actual}"
        f" ({report.long_samples} of {report.samples} samples are too long)",
        hint="raise the maximum length, or use --dynapipe-long-samples truncate (or skip)",
    )
