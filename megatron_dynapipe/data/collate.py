"""A planned micro-batch → host tensors: a padded row for each sample, or all of them packed into one row.

decoder-only, sequence a b c d            encoder–decoder, input a b c, target x y
  tokens    a b c .                         tokens          a b c .
  labels    b c d .                         decoder tokens  ^ x y .      ^ start, $ end, . pad
  loss mask 1 1 1 0                         labels          x y $ .
                                            loss mask       1 1 1 0

packed, sequences a b c d and x y z         packed, inputs a b c and d, targets x y and z
  tokens    a b c x y . . .                 tokens          a b c d . . . .
  labels    b c d y z . . .                 decoder tokens  ^ x y . ^ z . .      positions as planned: one is spare
  loss mask 1 1 1 1 1 0 0 0                 labels          x y $ . z $ . .
                                            loss mask       1 1 1 0 1 1 0 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_dynapipe.data.sample_rows import SampleRows, check_fits, put
from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.data.spans import LossOn, SpanTable, learned, truncated
from megatron_dynapipe.errors import DataError, PlanError
from megatron_dynapipe.plan.iteration import MicroBatch
from megatron_dynapipe.sampling.long_samples import TruncationSide
from megatron_dynapipe.units import BatchLayout, ModelFamily, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredFields:
    """Which tensors one pipeline stage reads; the stages in the middle read none and open no text.

    Attributes:
        tokens: the input's tokens, on the first stage (decoder-only: the sequence's).
        decoder_tokens: the decoder's input tokens, on the first decoder stage; encoder–decoder only.
        labels: labels and loss mask, on the last stage.
    """

    tokens: bool = False
    decoder_tokens: bool = False
    labels: bool = False

    @property
    def text(self) -> bool:
        """Whether any of them comes out of the dataset."""
        return self.tokens or self.decoder_tokens or self.labels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostMicroBatch:
    """One micro-batch on the host, of shape b × s (× t); tensors that the stage does not need are None.

    Attributes:
        index: number of the micro-batch in its replica's plan.
        family: kind of model.
        shape: (b, s, t); t is 0 for decoder-only models.
        input_lengths: int32[samples], real positions of s.
        decoder_lengths: int32[samples], real positions of t (target and one more); None for decoder-only models.
        input_segments: where the samples of a packed row lie, on every stage; None if it is padded.
        decoder_segments: likewise for the decoder's row; None for decoder-only models.
        tokens: int64[b, s].
        decoder_tokens: int64[b, t].
        labels: int64[b, t], decoder-only int64[b, s].
        loss_mask: float32 like labels, 1 where a label counts, 0 at padding.
        tasks: int64 like labels, the task of each position's sample; of evaluations alone.
    """

    index: int
    family: ModelFamily
    shape: Shape
    input_lengths: Tensor
    decoder_lengths: Tensor | None
    input_segments: RowSegments | None
    decoder_segments: RowSegments | None
    tokens: Tensor | None
    decoder_tokens: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    tasks: Tensor | None = None


class SampleReader(Protocol):
    """Samples by number: tokens of input and target; `IndexedReader` reads them from a dataset."""

    def __getitem__(self, sample: int, /) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


class SpecialTokens(Protocol):
    """The three tokens that collation adds; `DatasetMeta` has them."""

    @property
    def pad_id(self) -> int:
        """Fills up to the shape."""

    @property
    def bos_id(self) -> int:
        """Starts a decoder's input."""

    @property
    def eos_id(self) -> int:
        """Ends a target."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collator:
    """Builds the host tensors of planned micro-batches for one stage.

    Attributes:
        required: which tensors the stage reads.
        reader: the split's samples; may be None where the stage needs no text.
        special: pad, start and end tokens.
        layouts: what the run's settings allow its micro-batches.
        truncate: where samples that are planned shorter than they are lose tokens.
        loss_on: which tokens of a decoder-only sample count.
        spans: parts of inputs that count besides targets.
        task_ids: int16[samples], to say the task of every position; None where nobody asks.

    Raises:
        DataError: the stage needs text and there is no reader.
    """

    required: RequiredFields
    reader: SampleReader | None
    special: SpecialTokens
    layouts: Sequence[BatchLayout] = tuple(BatchLayout)
    truncate: TruncationSide = TruncationSide.RIGHT
    loss_on: LossOn = LossOn.EVERYTHING
    spans: SpanTable = field(default_factory=lambda: SpanTable(np.empty((0, 3), np.int64)))
    task_ids: npt.NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        if self.required.text and self.reader is None:
            raise DataError(f"expected a dataset to read for {self.required}, got none")

    def __call__(self, index: int, micro_batch: MicroBatch, family: ModelFamily) -> HostMicroBatch:
        """Collate micro-batch number `index` of a plan.

        Raises:
            PlanError: the layout is not allowed, or the shape smaller than a sample, or not that of the packed samples.
            DataError: the dataset has no such sample, or a shorter one than planned.
        """
        if micro_batch.layout not in self.layouts:
            raise PlanError(
                f"micro-batch {index}: expected a layout that the settings allow ({', '.join(self.layouts)}), got "
                f"{micro_batch.layout}",
                hint="plan again with the run's own settings",
            )
        collate = self._decoder_only if family is ModelFamily.GPT else self._encoder_decoder
        return collate(index, micro_batch)

    def _decoder_only(self, index: int, plan: MicroBatch) -> HostMicroBatch:
        positions = np.array(plan.positions(ModelFamily.GPT), np.int32)
        rows = SampleRows.of(index, ModelFamily.GPT, plan)
        check_fits(index, plan, "input", positions, plan.shape.input_length)
        tokens = self._filled(plan, plan.shape.input_length) if self.required.tokens else None
        labels, loss_mask, tasks = self._labels(plan, plan.shape.input_length)
        if self.required.text:
            for number, (sample, first) in enumerate(zip(plan.sample_ids, rows.input_starts, strict=True)):
                given, wanted = self._read(sample)
                planned = plan.input_lengths[number]
                counts = learned(sample, len(given), len(wanted), self.loss_on, self.spans)
                sequence = truncated(np.concatenate([given, wanted]), planned, self.truncate, "tokens", sample)
                counts = truncated(counts, planned, self.truncate, "tokens", sample)
                start = plan.pieces[number].start if plan.pieces else 0
                here, following = (slice(start + ahead, start + ahead + positions[number]) for ahead in (0, 1))
                # A sequence of one token keeps it, and trains on nothing.
                put(tokens, first, sequence[here])
                put(labels, first, sequence[following])
                put(loss_mask, first, counts[following])
                put(tasks, first, self._tasks_of(sample, len(sequence[following])))
        return HostMicroBatch(
            index=index,
            family=ModelFamily.GPT,
            shape=plan.shape,
            input_lengths=torch.from_numpy(positions),
            decoder_lengths=None,
            input_segments=rows.input_segments,
            decoder_segments=None,
            tokens=_tensor(tokens),
            decoder_tokens=None,
            labels=_tensor(labels),
            loss_mask=_tensor(loss_mask),
            tasks=_tensor(tasks),
        )

    def _encoder_decoder(self, index: int, plan: MicroBatch) -> HostMicroBatch:
        input_lengths = np.array(plan.input_lengths, np.int32)
        decoder_lengths = np.array(plan.target_lengths, np.int32) + 1
        rows = SampleRows.of(index, ModelFamily.T5, plan)
        check_fits(index, plan, "input", input_lengths, plan.shape.input_length)
        check_fits(index, plan, "decoder", decoder_lengths, plan.shape.target_length)
        tokens = self._filled(plan, plan.shape.input_length) if self.required.tokens else None
        decoder_tokens = self._filled(plan, plan.shape.target_length) if self.required.decoder_tokens else None
        labels, loss_mask, tasks = self._labels(plan, plan.shape.target_length)
        if self.required.text:
            for number, sample in enumerate(plan.sample_ids):
                given, wanted = self._read(sample)
                given = truncated(given, plan.input_lengths[number], self.truncate, "input tokens", sample)
                wanted = truncated(wanted, plan.target_lengths[number], self.truncate, "target tokens", sample)
                put(tokens, rows.input_starts[number], given)
                first = rows.target_starts[number]
                put(decoder_tokens, first, [self.special.bos_id, *wanted])
                put(labels, first, [*wanted, self.special.eos_id])
                put(loss_mask, first, np.ones(len(wanted) + 1))
                put(tasks, first, self._tasks_of(sample, len(wanted) + 1))
        return HostMicroBatch(
            index=index,
            family=ModelFamily.T5,
            shape=plan.shape,
            input_lengths=torch.from_numpy(input_lengths),
            decoder_lengths=torch.from_numpy(decoder_lengths),
            input_segments=rows.input_segments,
            decoder_segments=rows.target_segments,
            tokens=_tensor(tokens),
            decoder_tokens=_tensor(decoder_tokens),
            labels=_tensor(labels),
            loss_mask=_tensor(loss_mask),
            tasks=_tensor(tasks),
        )

    def _labels(
        self, plan: MicroBatch, length: int
    ) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float32] | None, npt.NDArray[np.int64] | None]:
        """Labels, loss mask and tasks to be written, where the stage needs them."""
        if not self.required.labels:
            return None, None, None
        tasks = None if self.task_ids is None else np.zeros((plan.shape.size, length), np.int64)
        return self._filled(plan, length), np.zeros((plan.shape.size, length), np.float32), tasks

    def _tasks_of(self, sample: int, positions: int) -> npt.NDArray[np.int64]:
        return np.full(positions, 0 if self.task_ids is None else self.task_ids[sample], np.int64)

    def _read(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert self.reader is not None
        given, wanted = self.reader[sample]
        return given.astype(np.int64), wanted.astype(np.int64)

    def _filled(self, plan: MicroBatch, length: int) -> npt.NDArray[np.int64]:
        return np.full((plan.shape.size, length), self.special.pad_id, np.int64)


def _tensor(array: npt.NDArray[np.generic] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
