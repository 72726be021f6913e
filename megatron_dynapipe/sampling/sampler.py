"""Which samples an iteration holds: a pure function of the settings and the iteration number."""

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling.batches import (
    Batches,
    LastBatch,
    ShuffledEpochs,
    TaskDraws,
    TaskRows,
    draws_of_rates,
)
from megatron_dynapipe.sampling.cutting import Cutter, TruncationSide
from megatron_dynapipe.sampling.lengths import LengthTable
from megatron_dynapipe.sampling.long_samples import LongSampleReport, LongSamples, apply_maximum
from megatron_dynapipe.sampling.spans import SpanTable

MOST_SHUFFLED = 2**22
"""The most samples whose permutation is kept in memory; places of more are computed one by one."""


class SamplerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that decide the order of samples; two ranks with equal settings see equal batches.

    Attributes:
        family: kind of model; decoder-only ones join input and target into one sequence.
        seed: seed of every permutation, at least 0.
        samples_per_iteration: samples of one global batch.
        max_input_length: longest input, in tokens (decoder-only: longest input and target together).
        max_target_length: longest target, in tokens, without start and end tokens; not used for decoder-only.
        long_samples: what to do with longer ones.
        sides: where inputs lose tokens, by the index of the sample's task; or the same side for all.
        task_rates: how often each task is drawn, by its index; empty for as often as it has samples.
        tokens_per_iteration: tokens (input and target) of one global batch at most, in place of a number of samples.
        last_batch: what becomes of an epoch's end that does not fill a batch.
        epochs: after which no samples come; None for never.
        labels: whether batches say how many positions count: targets' and earlier turns'.
    """

    family: ModelFamily
    seed: int
    samples_per_iteration: int
    max_input_length: int
    max_target_length: int = 0
    long_samples: LongSamples = LongSamples.FAIL
    sides: tuple[TruncationSide, ...] = (TruncationSide.RIGHT,)
    task_rates: tuple[float, ...] = ()
    tokens_per_iteration: int | None = None
    last_batch: LastBatch = LastBatch.CONTINUE
    epochs: int | None = None
    labels: bool = False

    def __post_init__(self) -> None:
        least = {
            "seed": 0,
            "samples_per_iteration": 1,
            # A sequence of one token predicts nothing.
            "max_input_length": 1 if self.family.is_encoder_decoder else 2,
            "max_target_length": 1 if self.family.is_encoder_decoder else 0,
        }
        for name, minimum in least.items():
            if not getattr(self, name) >= minimum:
                raise ConfigError(f"expected {name} of at least {minimum}, got {getattr(self, name)}")
        for name in ("tokens_per_iteration", "epochs"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"expected {name} of at least 1, got {getattr(self, name)}")

    @property
    def needs_tasks(self) -> bool:
        """Whether samples are drawn or cut by their task."""
        return bool(self.task_rates) or len(self.sides) > 1


class Sampler:
    """Assigns the samples of a split to iterations, epoch after epoch, each epoch in its own order.

    The stream of samples is the concatenation of the epochs; iteration i is a slice of it. Nothing is carried from one
    iteration to the next, so resuming is asking for a later one, and the number of replicas does not matter.

    Args:
        lengths: tokens of every sample of the split.
        settings: what decides the order.
        task_ids: int16[n], the task of each sample; where `settings.needs_tasks`.
        spans: what counts in addition to targets, and where conversations may be cut.
        first_iteration: the first that is asked for.
        first_sample: the place of the stream at which it begins.

    Attributes:
        cutter: cuts samples that are longer than the maximum.
        report: how many are, and what was done with them.
        batches: the place of every iteration in the stream.

    Raises:
        DataError: samples are too long and the policy is to fail, or none is left.
        ConfigError: the tasks are needed and not there, or no epoch would fill a batch.
    """

    def __init__(
        self,
        lengths: LengthTable,
        settings: SamplerSettings,
        task_ids: npt.NDArray[np.int16] | None = None,
        spans: SpanTable | None = None,
        *,
        first_iteration: int = 0,
        first_sample: int = 0,
    ) -> None:
        self.settings = settings
        self._check_tasks(lengths, task_ids)
        spans = spans or SpanTable.empty()
        spans.check(lengths.input)
        self.cutter = Cutter(settings.family, settings.sides, spans, task_ids)
        self.report: LongSampleReport
        self._usable, self.report = apply_maximum(lengths, settings, self.cutter)
        self._order = self._order_of(task_ids)
        self.batches = Batches(
            self._order.per_epoch,
            samples=settings.samples_per_iteration if settings.tokens_per_iteration is None else None,
            tokens=settings.tokens_per_iteration,
            lengths=self._tokens,
            last=settings.last_batch,
            epochs=settings.epochs,
            first_iteration=first_iteration,
            first_place=first_sample,
        )

    @property
    def samples_per_epoch(self) -> int:
        """Samples drawn in one epoch; all usable ones once, unless tasks have rates."""
        return self._order.per_epoch

    def longest(self, samples: int) -> GlobalBatch:
        """A batch of so many samples that repeats the two of the longest input and the longest target."""
        return self._batch(0, np.resize(np.array(self._usable.longest, np.int64), samples))

    def batch(self, iteration: int) -> GlobalBatch:
        """The global batch of `iteration` (from 0).

        Raises:
            ConfigError: the iteration is before the first, or after the last epoch.
        """
        return self._batch(iteration, self._usable.ids(self._order.rows(*self.batches.bounds(iteration))))

    def _batch(self, iteration: int, ids: npt.NDArray[np.int64]) -> GlobalBatch:
        inputs, targets = self._usable.lengths(ids)
        labels = self._usable.labels(ids) if self.settings.labels else None
        return GlobalBatch(
            iteration=iteration, sample_ids=ids, input_lengths=inputs, target_lengths=targets, labels=labels
        )

    def _tokens(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens of the samples at places of the stream."""
        inputs, targets = self._usable.lengths(self._usable.ids(self._order.rows(first, stop)))
        return inputs.astype(np.int64) + targets

    def long_by_task(self, task_ids: npt.NDArray[np.int16]) -> dict[int, tuple[int, int]]:
        """What is longer than the maximum of each task that has such samples."""
        return self._usable.long_by_task(task_ids)

    def _check_tasks(self, table: LengthTable, task_ids: npt.NDArray[np.int16] | None) -> None:
        needed = max(len(self.settings.task_rates), len(self.settings.sides))
        if not self.settings.needs_tasks:
            return
        if task_ids is None:
            raise ConfigError(
                f"expected the samples' tasks for their rates or sides, of {needed} tasks, got none",
                hint="read them with read_task_ids",
            )
        if len(task_ids) != len(table):
            raise DataError(f"expected the tasks of {len(table)} samples, got the tasks of {len(task_ids)}")
        if len(task_ids) and int(task_ids.max()) >= needed:
            raise DataError(f"expected tasks below {needed}, got {task_ids.max()}")

    def _order_of(self, task_ids: npt.NDArray[np.int16] | None) -> ShuffledEpochs | TaskDraws:
        settings = self.settings
        count = len(self._usable)
        if not settings.task_rates:
            is_large = count > MOST_SHUFFLED
            rows = TaskRows.one(count)
            return TaskDraws(settings.seed, rows, [count]) if is_large else ShuffledEpochs(settings.seed, count)
        assert task_ids is not None, "rates need tasks"
        rows = TaskRows.of(task_ids if self._usable.sample_ids is None else task_ids[self._usable.sample_ids])
        rates = [settings.task_rates[task] for task in rows.tasks]
        if not min(rates) > 0:
            raise ConfigError(f"expected rates above 0 of tasks that have samples, got {min(rates)}")
        return TaskDraws(settings.seed, rows, draws_of_rates(rows.sizes.tolist(), rates))
