"""Which samples an iteration holds: a pure function of the settings and the iteration number."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.sampling.lengths import LengthTable
from megatron_dynapipe.sampling.long_samples import LongSampleReport, LongSamples, apply_maximum
from megatron_dynapipe.units import ModelFamily

_EPOCHS_KEPT = 2
"""Permutations kept in memory; an iteration that spans two epochs needs both."""


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides the order of samples; two ranks with equal settings see equal batches.

    Attributes:
        family: "gpt" joins input and target into one sequence; "t5" keeps them apart.
        seed: seed of every permutation, at least 0.
        samples_per_iteration: samples of one global batch.
        max_input_length: longest input, in tokens (decoder-only: longest input and target together).
        max_target_length: longest target, in tokens, without start and end tokens; not used for decoder-only.
        long_samples: what to do with longer ones.
        mixture_temperature: 1 draws tasks in proportion to their size; T > 1 in proportion to size^(1/T), so that
            small tasks are seen more often (and large ones not wholly in every epoch).
    """

    family: ModelFamily
    seed: int
    samples_per_iteration: int
    max_input_length: int
    max_target_length: int = 0
    long_samples: LongSamples = LongSamples.FAIL
    mixture_temperature: float = 1.0

    def __post_init__(self) -> None:
        least = {
            "seed": 0,
            "samples_per_iteration": 1,
            # A sequence of one token predicts nothing.
            "max_input_length": 2 if self.family is ModelFamily.GPT else 1,
            "max_target_length": 0 if self.family is ModelFamily.GPT else 1,
            "mixture_temperature": 1.0,
        }
        for name, minimum in least.items():
            if not getattr(self, name) >= minimum:
                raise ConfigError(f"expected {name} of at least {minimum}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalBatch:
    """The samples of one iteration, with their lengths in tokens after truncation.

    The same sample can occur twice where an iteration spans two epochs, or a mixture repeats a small task.

    Attributes:
        iteration: number of the iteration, from 0.
        sample_ids: int64[n], documents of the split.
        input_lengths: int32[n]; for decoder-only models, of input and target together.
        target_lengths: int32[n]; 0 for decoder-only models.
    """

    iteration: int
    sample_ids: npt.NDArray[np.int64]
    input_lengths: npt.NDArray[np.int32]
    target_lengths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.sample_ids)


class Sampler:
    """Assigns the samples of a split to iterations, epoch after epoch, each epoch in its own order.

    The stream of samples is the concatenation of the epochs' permutations; iteration i is its slice
    `[i * n, (i + 1) * n)`. Nothing is carried from one iteration to the next, so resuming is asking for a later one.

    Args:
        lengths: tokens of every sample of the split.
        settings: what decides the order.
        task_ids: int16[n], the task of each sample; needed when `mixture_temperature` is not 1.

    Attributes:
        report: how many samples were longer than the maximum, and what was done with them.

    Raises:
        DataError: samples are too long and the policy is to fail, or none is left.
    """

    def __init__(
        self, lengths: LengthTable, settings: SamplerSettings, task_ids: npt.NDArray[np.int16] | None = None
    ) -> None:
        self.settings = settings
        self.report: LongSampleReport
        self._usable, self.report = apply_maximum(
            lengths,
            family=settings.family,
            max_input_length=settings.max_input_length,
            max_target_length=settings.max_target_length,
            policy=settings.long_samples,
        )
        self._tasks = self._rows_by_task(lengths, task_ids)
        self._draws = samples_per_task([len(rows) for rows in self._tasks], settings.mixture_temperature)
        self._epochs: OrderedDict[int, npt.NDArray[np.int64]] = OrderedDict()

    @property
    def samples_per_epoch(self) -> int:
        """Samples drawn in one epoch; all usable ones once, unless a mixture temperature is set."""
        return len(self._usable.sample_ids)

    def longest(self, samples: int) -> GlobalBatch:
        """A batch of so many samples that repeats the two of the longest input and the longest target."""
        usable = self._usable
        rows = np.resize([int(usable.input_lengths.argmax()), int(usable.target_lengths.argmax())], samples)
        return GlobalBatch(
            iteration=0,
            sample_ids=usable.sample_ids[rows],
            input_lengths=usable.input_lengths[rows],
            target_lengths=usable.target_lengths[rows],
        )

    def batch(self, iteration: int) -> GlobalBatch:
        """The global batch of `iteration` (from 0).

        Raises:
            ConfigError: the iteration is negative.
        """
        if iteration < 0:
            raise ConfigError(f"expected an iteration of at least 0, got {iteration}")
        per_iteration, per_epoch = self.settings.samples_per_iteration, self.samples_per_epoch
        position, stop = iteration * per_iteration, (iteration + 1) * per_iteration
        pieces = []
        while position < stop:
            epoch, offset = divmod(position, per_epoch)
            piece = self._epoch(epoch)[offset : offset + stop - position]
            pieces.append(piece)
            position += len(piece)
        rows = np.concatenate(pieces)
        return GlobalBatch(
            iteration=iteration,
            sample_ids=self._usable.sample_ids[rows],
            input_lengths=self._usable.input_lengths[rows],
            target_lengths=self._usable.target_lengths[rows],
        )

    def _rows_by_task(
        self, lengths: LengthTable, task_ids: npt.NDArray[np.int16] | None
    ) -> list[npt.NDArray[np.int64]]:
        """Rows of the usable samples, one array per task that has any; one task in all where tasks do not matter."""
        if self.settings.mixture_temperature == 1.0:
            return [np.arange(self.samples_per_epoch)]
        if task_ids is None:
            raise ConfigError(
                f"expected the samples' tasks for a mixture_temperature of {self.settings.mixture_temperature},"
                " got none",
                hint="read them with read_task_ids, or use a mixture_temperature of 1",
            )
        if len(task_ids) != len(lengths):
            raise DataError(f"expected the tasks of {len(lengths)} samples, got those of {len(task_ids)}")
        usable_tasks = task_ids[self._usable.sample_ids]
        return [np.flatnonzero(usable_tasks == task) for task in np.unique(usable_tasks)]

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Rows of the usable samples in the order in which `epoch` draws them."""
        rows = self._epochs.get(epoch)
        if rows is None:
            random = np.random.Generator(np.random.PCG64([self.settings.seed, epoch]))
            # np.resize repeats or truncates a task's shuffled rows to the task's number of draws.
            drawn: list[Any] = [
                np.resize(random.permutation(task_rows), count)
                for task_rows, count in zip(self._tasks, self._draws, strict=True)
            ]
            rows = random.permutation(np.concatenate(drawn))
            self._epochs[epoch] = rows
        self._epochs.move_to_end(epoch)
        while len(self._epochs) > _EPOCHS_KEPT:
            self._epochs.popitem(last=False)
        return rows


def samples_per_task(sizes: list[int], temperature: float) -> list[int]:
    """Assign the sum(sizes) draws of an epoch to tasks in proportion to size^(1/temperature), by largest remainders.

    Temperature 1 gives every task its own size.
    """
    weights = np.asarray(sizes, np.float64) ** (1.0 / temperature)
    exact = weights * (sum(sizes) / weights.sum())
    counts = np.floor(exact + 1e-9).astype(np.int64)
    left = sum(sizes) - int(counts.sum())
    # Ties go to the task with the lower index.
    largest = np.argsort(-(exact - counts), kind="stable")[:left]
    counts[largest] += 1
    return [int(count) for count in counts]
