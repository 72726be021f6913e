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

decoder-only, losses of targets d and z: the head runs for these alone
  rows      2 4 0 0 0 0 0 0                 labels d z b b b b b b      loss mask 1 1 0 0 0 0 0 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_dynapipe.core.errors import DataError, PlanError
from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import LENGTH_MULTIPLE, BatchLayout, ModelFamily, Shape, round_up, sequence_positions
from megatron_dynapipe.data.segments import RowSegments, SampleRows, check_fits, put
from megatron_dynapipe.data.shares import chunk_of, held, share_segments
from megatron_dynapipe.data.spans import LossOn, kept_pair, sequence
from megatron_dynapipe.sampling import Cutter


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredFields:
    """The tensors that one pipeline stage reads; the stages in the middle read none and open no text.

    Attributes:
        tokens: the input's tokens, on the first stage (decoder-only: the sequence's).
        decoder_tokens: the decoder's input tokens, on the first decoder stage; encoder–decoder only.
        labels: labels and loss mask, on the last stage.
        samples: the sample of each position, where routers of experts add terms; decoder-only.
    """

    tokens: bool = False
    decoder_tokens: bool = False
    labels: bool = False
    samples: bool = False

    @property
    def text(self) -> bool:
        """Whether any of them comes out of the dataset."""
        return self.tokens or self.decoder_tokens or self.labels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostMicroBatch:
    """One micro-batch on the host, of shape b × s (× t); tensors that the stage does not need are None.

    Attributes:
        index: number of the micro-batch in its replica's plan.
        shape: (b, s, t); t is 0 for decoder-only models.
        input_lengths: int32[samples], real positions of s.
        decoder_lengths: int32[samples], real positions of t (target and one more); None for decoder-only models.
        input_segments: where the samples of a packed row lie, on every stage; None if it is padded, unless it has
            shares.
        decoder_segments: likewise for the decoder's row; None for decoder-only models.
        tokens: int64[b, s].
        decoder_tokens: int64[b, t].
        labels: int64[b, t], decoder-only int64[b, s].
        loss_mask: float32 like labels, 1 where a label counts, 0 at padding.
        tasks: int64 like labels, the task of each position's sample; None where nobody asks.
        rows: int64[n], position · b + sample of each label; then labels, loss mask and tasks are [1, n]. None where
            there is a label for each position.
        samples: int64[s, b] of `sample_numbers`; None where nobody asks.
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
    rows: Tensor | None = None
    samples: Tensor | None = None


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
        batch_layouts: what the run's settings allow its micro-batches.
        loss_on: which tokens of a decoder-only sample count.
        cutter: cuts samples that are planned shorter than they are, and knows what counts in addition to targets.
        task_ids: int16[samples], to say the task of every position; None where nobody asks.
        length_multiple: rows of labels alone are a multiple of it, as the settings' lengths are.

    Raises:
        DataError: the stage needs text and there is no reader.
    """

    required: RequiredFields
    reader: SampleReader | None
    special: SpecialTokens
    batch_layouts: Sequence[BatchLayout] = tuple(BatchLayout)
    loss_on: LossOn = LossOn.EVERYTHING
    cutter: Cutter | None = None
    task_ids: npt.NDArray[np.int16] | None = None
    length_multiple: int = LENGTH_MULTIPLE

    def __post_init__(self) -> None:
        if self.required.text and self.reader is None:
            raise DataError(f"expected a dataset to read for {self.required}, got none")

    def __call__(self, index: int, micro_batch: MicroBatch, family: ModelFamily) -> HostMicroBatch:
        """Collate micro-batch number `index` of a plan.

        Raises:
            PlanError: the layout is not allowed, or the shape smaller than a sample, or not that of the packed samples.
            DataError: the dataset has no such sample, or one that cannot have been planned so.
        """
        if micro_batch.layout not in self.batch_layouts:
            raise PlanError(
                f"micro-batch {index}: expected a layout that the settings allow ({', '.join(self.batch_layouts)}), "
                f"got {micro_batch.layout}",
                hint="plan again with the run's own settings",
            )
        plan = micro_batch
        has_decoder = family.is_encoder_decoder
        rows = SampleRows.of(index, family, plan)
        input_lengths = np.array(plan.positions(family), np.int32)
        check_fits(index, plan, "input", input_lengths, plan.shape.input_length)
        decoder_lengths = None
        if has_decoder:
            decoder_lengths = np.array(plan.target_lengths, np.int32) + 1
            check_fits(index, plan, "decoder", decoder_lengths, plan.shape.target_length)
        samples = sample_numbers(plan.positions(family), *plan.shape[:2]) if self.required.samples else None
        return HostMicroBatch(
            index=index,
            family=family,
            shape=plan.shape,
            input_lengths=torch.from_numpy(input_lengths),
            decoder_lengths=None if decoder_lengths is None else torch.from_numpy(decoder_lengths),
            input_segments=share_segments(family, plan) if plan.share[0] > 1 else rows.input_segments,
            decoder_segments=rows.target_segments,
            samples=None if samples is None else torch.from_numpy(samples),
            **self._text(plan, family, rows),
        )

    def _text(self, plan: MicroBatch, family: ModelFamily, rows: SampleRows) -> dict[str, Tensor | None]:
        """The tensors that come out of the dataset."""
        needed = self.required
        has_decoder = family.is_encoder_decoder
        cutter = self.cutter or Cutter(family)
        labelled = plan.shape.target_length if has_decoder else plan.shape.input_length
        size = (plan.shape.size, labelled)
        tokens = self._filled(plan, plan.shape.input_length) if needed.tokens else None
        decoder_tokens = self._filled(plan, labelled) if needed.decoder_tokens and has_decoder else None
        labels = self._filled(plan, labelled) if needed.labels else None
        loss_mask = np.zeros(size, np.float32) if needed.labels else None
        tasks = np.zeros(size, np.int64) if needed.labels and self.task_ids is not None else None
        read, starts = (self._pair, rows.target_starts) if has_decoder else (self._sequence, rows.input_starts)
        for number, sample in enumerate(plan.sample_ids if needed.text else ()):
            inputs, decoder_given, targets, counts = read(cutter, plan, number)
            put(tokens, rows.input_starts[number], inputs)
            put(decoder_tokens, starts[number], decoder_given)
            put(labels, starts[number], targets)
            put(loss_mask, starts[number], counts)
            if self.task_ids is not None:
                put(tasks, starts[number], np.full(len(targets), self.task_ids[sample], np.int64))
        arrays: dict[str, npt.NDArray[Any] | None] = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        arrays |= {"labels": labels, "loss_mask": loss_mask, "tasks": tasks}
        if loss_mask is not None and plan.labels:
            of_positions = {"labels": labels, "loss_mask": loss_mask, "tasks": tasks}
            arrays |= _rows_alone(loss_mask, of_positions, self.length_multiple)
        return {name: None if array is None else torch.from_numpy(array) for name, array in arrays.items()}

    def _sequence(
        self, cutter: Cutter, plan: MicroBatch, number: int
    ) -> tuple[npt.ArrayLike, npt.ArrayLike, Any, npt.ArrayLike]:
        """A decoder-only sample, its piece or share: tokens, none of a decoder's, labels, and which of these count."""
        sample = plan.sample_ids[number]
        planned = plan.input_lengths[number]
        tokens, counts = sequence(cutter, sample, self._read(sample), planned, self.loss_on)
        start, end = plan.pieces[number] if plan.pieces else (0, sequence_positions(planned))
        following = slice(start + 1, end + 1)  # none of a sequence of one token, which trains on nothing
        if plan.share[0] == 1:
            return tokens[start:end], (), tokens[following], counts[following]
        take = partial(held, share=plan.share, chunk=chunk_of(cutter.family, plan, number))
        pad = self.special.pad_id
        return take(tokens[:end], fill=pad), (), take(tokens[following], fill=pad), take(counts[following], fill=0)

    def _pair(
        self, cutter: Cutter, plan: MicroBatch, number: int
    ) -> tuple[npt.ArrayLike, npt.ArrayLike, Any, npt.ArrayLike]:
        """An encoder–decoder sample, likewise."""
        sample = plan.sample_ids[number]
        planned = plan.input_lengths[number], plan.target_lengths[number]
        inputs, targets = kept_pair(cutter, sample, self._read(sample), planned)
        return inputs, [self.special.bos_id, *targets], [*targets, self.special.eos_id], np.ones(len(targets) + 1)

    def _read(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert self.reader is not None
        inputs, targets = self.reader[sample]
        return inputs.astype(np.int64), targets.astype(np.int64)

    def _filled(self, plan: MicroBatch, length: int) -> npt.NDArray[np.int64]:
        return np.full((plan.shape.size, length), self.special.pad_id, np.int64)


def sample_numbers(lengths: Sequence[int], size: int, positions: int) -> npt.NDArray[np.int64]:
    """The place of each position's sample in its micro-batch, their number for padding: int64[s, b].

    Args:
        lengths: positions of every sample.
        size: rows, b; one holds all samples, one after another.
        positions: positions of a row, s.
    """
    if size == 1:
        return np.repeat(np.arange(len(lengths) + 1), (*lengths, positions - sum(lengths)))[:, None]
    rows = np.array((*lengths, *[0] * (size - len(lengths))))
    return np.where(np.arange(positions)[:, None] < rows, np.arange(size), len(lengths))


def _rows_alone(
    counts: npt.NDArray[np.float32], of_positions: Mapping[str, npt.NDArray[Any] | None], multiple: int
) -> dict[str, npt.NDArray[Any] | None]:
    """The positions that count, padded by some that do not, and what is theirs: `[b, s]` → `[1, n]`.

    Nothing where that would be all positions.
    """
    counting = np.flatnonzero(counts.T)
    length = max(round_up(len(counting), multiple), multiple)
    if length >= counts.size:
        return {}
    rows = np.pad(counting, (0, length - len(counting)))
    taken = {name: None if array is None else array.T.reshape(1, -1)[:, rows] for name, array in of_positions.items()}
    loss_mask = taken["loss_mask"]
    assert loss_mask is not None
    loss_mask[:, len(counting) :] = 0
    return {**taken, "rows": rows}
