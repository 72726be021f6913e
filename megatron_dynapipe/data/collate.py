"""A planned micro-batch → host tensors, padded to the micro-batch's own shape.

decoder-only, sequence a b c d            encoder–decoder, input a b c, target x y
  tokens    a b c .                         tokens          a b c .
  labels    b c d .                         decoder tokens  ^ x y .      ^ start, $ end, . pad
  loss mask 1 1 1 0                         labels          x y $ .
                                            loss mask       1 1 1 0
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_dynapipe.errors import DataError, PlanError
from megatron_dynapipe.plan.iteration import MicroBatch
from megatron_dynapipe.units import ModelFamily, Shape, input_positions


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
    """One micro-batch on the host, b × s (× t) padded; tensors that the stage does not need are None.

    Attributes:
        index: number of the micro-batch in its replica's plan.
        family: kind of model.
        shape: (b, s, t); t is 0 for decoder-only models.
        input_lengths: int32[b], real positions of s.
        decoder_lengths: int32[b], real positions of t (target and one more); None for decoder-only models.
        tokens: int64[b, s].
        decoder_tokens: int64[b, t].
        labels: int64[b, t], decoder-only int64[b, s].
        loss_mask: float32 like labels, 1 where a label counts, 0 at padding.
    """

    index: int
    family: ModelFamily
    shape: Shape
    input_lengths: Tensor
    decoder_lengths: Tensor | None
    tokens: Tensor | None
    decoder_tokens: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None


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

    Raises:
        DataError: the stage needs text and there is no reader.
    """

    required: RequiredFields
    reader: SampleReader | None
    special: SpecialTokens

    def __post_init__(self) -> None:
        if self.required.text and self.reader is None:
            raise DataError(f"expected a dataset to read for {self.required}, got none")

    def __call__(self, index: int, micro_batch: MicroBatch, family: ModelFamily) -> HostMicroBatch:
        """Collate micro-batch number `index` of a plan.

        Raises:
            PlanError: the shape is smaller than a sample.
            DataError: the dataset has no such sample, or a shorter one than planned.
        """
        collate = self._decoder_only if family is ModelFamily.GPT else self._encoder_decoder
        return collate(index, micro_batch)

    def _decoder_only(self, index: int, plan: MicroBatch) -> HostMicroBatch:
        positions = np.array([input_positions(ModelFamily.GPT, tokens) for tokens in plan.input_lengths], np.int32)
        _check_fits(index, plan, "input", positions, plan.shape.input_length)
        size, length = plan.shape.size, plan.shape.input_length
        tokens = self._filled(size, length) if self.required.tokens else None
        labels = self._filled(size, length) if self.required.labels else None
        loss_mask = np.zeros((size, length), np.float32) if self.required.labels else None
        if self.required.text:
            for row in range(size):
                sequence = np.concatenate(self._read(plan.sample_ids[row]))
                sequence = _first(sequence, plan.input_lengths[row], "tokens", plan.sample_ids[row])
                if tokens is not None:
                    # A sequence of one token keeps it, and trains on nothing.
                    tokens[row, : positions[row]] = sequence[: positions[row]]
                if labels is not None and loss_mask is not None:
                    labels[row, : len(sequence) - 1] = sequence[1:]
                    loss_mask[row, : len(sequence) - 1] = 1.0
        return HostMicroBatch(
            index=index,
            family=ModelFamily.GPT,
            shape=plan.shape,
            input_lengths=torch.from_numpy(positions),
            decoder_lengths=None,
            tokens=_tensor(tokens),
            decoder_tokens=None,
            labels=_tensor(labels),
            loss_mask=_tensor(loss_mask),
        )

    def _encoder_decoder(self, index: int, plan: MicroBatch) -> HostMicroBatch:
        input_lengths = np.array(plan.input_lengths, np.int32)
        decoder_lengths = np.array(plan.target_lengths, np.int32) + 1
        _check_fits(index, plan, "input", input_lengths, plan.shape.input_length)
        _check_fits(index, plan, "decoder", decoder_lengths, plan.shape.target_length)
        size, input_length, target_length = plan.shape
        tokens = self._filled(size, input_length) if self.required.tokens else None
        decoder_tokens = self._filled(size, target_length) if self.required.decoder_tokens else None
        labels = self._filled(size, target_length) if self.required.labels else None
        loss_mask = np.zeros((size, target_length), np.float32) if self.required.labels else None
        if self.required.text:
            for row, sample in enumerate(plan.sample_ids):
                given, wanted = self._read(sample)
                given = _first(given, plan.input_lengths[row], "input tokens", sample)
                wanted = _first(wanted, plan.target_lengths[row], "target tokens", sample)
                if tokens is not None:
                    tokens[row, : len(given)] = given
                if decoder_tokens is not None:
                    decoder_tokens[row, 0] = self.special.bos_id
                    decoder_tokens[row, 1 : len(wanted) + 1] = wanted
                if labels is not None and loss_mask is not None:
                    labels[row, : len(wanted)] = wanted
                    labels[row, len(wanted)] = self.special.eos_id
                    loss_mask[row, : len(wanted) + 1] = 1.0
        return HostMicroBatch(
            index=index,
            family=ModelFamily.T5,
            shape=plan.shape,
            input_lengths=torch.from_numpy(input_lengths),
            decoder_lengths=torch.from_numpy(decoder_lengths),
            tokens=_tensor(tokens),
            decoder_tokens=_tensor(decoder_tokens),
            labels=_tensor(labels),
            loss_mask=_tensor(loss_mask),
        )

    def _read(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert self.reader is not None
        given, wanted = self.reader[sample]
        return given.astype(np.int64), wanted.astype(np.int64)

    def _filled(self, size: int, length: int) -> npt.NDArray[np.int64]:
        return np.full((size, length), self.special.pad_id, np.int64)


def _first(tokens: npt.NDArray[np.int64], planned: int, what: str, sample: int) -> npt.NDArray[np.int64]:
    """The first `planned` tokens: truncation; a sample that has fewer is not the one that was planned."""
    if planned > len(tokens):
        raise DataError(
            f"expected {planned} {what} of sample {sample} as planned, the dataset has {len(tokens)}",
            hint="the plan was made from another dataset, or another split of it",
        )
    return tokens[:planned]


def _check_fits(index: int, plan: MicroBatch, what: str, positions: npt.NDArray[np.int32], length: int) -> None:
    """Every sample's real positions lie within the padded shape, and there is at least one."""
    if int(positions.max()) > length or int(positions.min()) < 1:
        at = int(np.argmax((positions > length) | (positions < 1)))
        raise PlanError(
            f"micro-batch {index} of shape {plan.shape}: expected 1…{length} {what} positions,"
            f" sample {plan.sample_ids[at]} needs {positions[at]}"
        )


def _tensor(array: npt.NDArray[np.generic] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
