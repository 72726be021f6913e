"""What is kept of a sample that is longer than a run takes, and how many of its positions count then.

input a b c d e f g h, target x y z; 8 tokens in all
  right      a b c d e . . .   x y z      the end of the input goes (default)
  left       . . . d e f g h   x y z      its beginning
  middle     a b c . . . g h   x y z      its middle
input a b C d e f G h with earlier answers C and G, target x y z; 8 tokens in all
  left       . . . d e f G h   x y z      whole turns go: what is kept begins after an answer, if that fits

A target loses tokens only if it does not fit next to one token of the input, and then its last ones. So every
sample keeps something to learn. Inputs and targets of a T5 have limits of their own.

The same rule gives the lengths and labels that plans are made from (`sampler`) and the tokens that are trained
(`data.spans`). A kept sample cut again to its own length stays as it is, so that the length in a plan says it all.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling.spans import SpanTable

Ints = npt.NDArray[np.int64]


class TruncationSide(enum.StrEnum):
    """The part of an input that loses tokens if it is too long: its end, its beginning, or its middle."""

    RIGHT = "right"
    LEFT = "left"
    MIDDLE = "middle"


_CODES = tuple(TruncationSide)
_LEFT, _MIDDLE = _CODES.index(TruncationSide.LEFT), _CODES.index(TruncationSide.MIDDLE)


class Cut(NamedTuple):
    """What is kept of some samples.

    Attributes:
        head: int64[n], tokens at the beginning of each input.
        tail: int64[n], tokens at its end; 0 of an input that is whole.
        target: int64[n], tokens at the beginning of each target.
    """

    head: Ints
    tail: Ints
    target: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Cutter:
    """Cuts the samples of a split of a dataset.

    Attributes:
        family: kind of model; decoder-only ones join input and target into one sequence.
        sides: where inputs lose tokens, by task; or the same side for all.
        spans: parts of inputs that are learned, too.
        task_ids: int16[samples]; needed where there is more than one side.
    """

    family: ModelFamily
    sides: Sequence[TruncationSide] = (TruncationSide.RIGHT,)
    spans: SpanTable = field(default_factory=SpanTable.empty)
    task_ids: npt.NDArray[np.int16] | None = None

    def cut(self, ids: Ints, inputs: npt.NDArray[Any], targets: npt.NDArray[Any], most: tuple[Any, Any]) -> Cut:
        """What is kept of samples.

        Args:
            ids: int64[n], samples.
            inputs: int[n], tokens of each input in the dataset, at least 1.
            targets: int[n], likewise of each target.
            most: tokens of an input (decoder-only: of input and target together, at least 2) and of a target, for all
                or int[n] for each.
        """
        inputs = inputs.astype(np.int64)
        targets = targets.astype(np.int64)
        if self.family.is_encoder_decoder:
            target = np.minimum(targets, most[1])
            room = np.broadcast_to(np.asarray(most[0], np.int64), inputs.shape)
        else:
            target = np.minimum(targets, most[0] - 1)
            room = most[0] - target
        kept = np.minimum(inputs, room)
        sides = self._sides(ids)
        tail = np.where(sides == _LEFT, kept, np.where(sides == _MIDDLE, kept // 2, 0))
        if len(self.spans.rows):
            after = self.spans.end_from(ids, inputs - room)  # of the first answer that can go with all before it
            tail = np.where((sides == _LEFT) & (after >= 0) & (after < inputs), inputs - after, tail)
        head = np.where(sides == _LEFT, 0, kept - tail)
        is_whole = inputs <= room
        return Cut(np.where(is_whole, inputs, head), np.where(is_whole, 0, tail), target)

    def lengths(self, cut: Cut) -> tuple[Ints, Ints]:
        """Tokens of inputs and of targets that are kept; of decoder-only samples of both together, and 0."""
        inputs = cut.head + cut.tail
        if self.family.is_encoder_decoder:
            return inputs, cut.target
        return inputs + cut.target, np.zeros_like(inputs)

    def learned(self, ids: Ints, inputs: npt.NDArray[Any], cut: Cut) -> Ints:
        """Kept tokens that are learned if targets are: the targets' and, in one sequence, the earlier answers'."""
        if self.family.is_encoder_decoder or not len(self.spans.rows):
            return cut.target
        before = self.spans.tokens_before
        of_tail = before(ids, inputs) - before(ids, inputs - cut.tail)
        return cut.target + before(ids, cut.head) + of_tail

    def learned_in_all(self, targets: npt.NDArray[Any]) -> int:
        """Tokens of whole samples that are to be learned where targets are, from the tokens of all targets."""
        answers = 0 if self.family.is_encoder_decoder else self.spans.tokens
        return int(targets.sum(dtype=np.int64)) + answers

    def labels(self, ids: Ints, inputs: npt.NDArray[Any], cut: Cut) -> Ints:
        """Positions of decoder-only samples that count where losses are of targets: no position predicts the first."""
        learned = self.learned(ids, inputs, cut)
        if not len(self.spans.rows):
            return learned
        first = np.where(cut.head > 0, 0, inputs - cut.tail)
        before = self.spans.tokens_before
        return learned - (before(ids, first + 1) - before(ids, first))

    def planned(self, sample: int, inputs: int, targets: int, lengths: tuple[int, int]) -> tuple[int, int, int]:
        """What is kept of one sample that is planned with some lengths: head, tail and target, as in a `Cut`.

        Args:
            sample: its number.
            inputs: tokens of its input in the dataset.
            targets: tokens of its target there.
            lengths: those planned, as `lengths` gives them.

        Raises:
            DataError: no cut of this sample has these lengths.
        """
        is_pair = self.family.is_encoder_decoder
        there = (inputs, targets) if is_pair else (inputs + targets, 0)
        if there == lengths:
            return inputs, 0, targets
        of_sample = np.array([sample]), np.array([inputs]), np.array([targets])
        cut = self.cut(*of_sample, lengths)
        names = ("input tokens", "target tokens") if is_pair else ("tokens",)
        for what, planned, kept, whole in zip(names, lengths, self.lengths(cut), there, strict=False):
            if planned != kept[0]:
                raise DataError(
                    f"expected {planned} {what} of sample {sample} as planned, the dataset has {whole}",
                    hint="the plan was made from another dataset, or another split of it",
                )
        return int(cut.head[0]), int(cut.tail[0]), int(cut.target[0])

    def _sides(self, ids: Ints) -> npt.NDArray[np.int8]:
        codes = np.array([_CODES.index(side) for side in self.sides], np.int8)
        if len(codes) == 1:
            return np.broadcast_to(codes, ids.shape)
        if self.task_ids is None:
            raise DataError(f"expected the samples' tasks for {len(codes)} sides, got none")
        sides: npt.NDArray[np.int8] = codes[self.task_ids[ids]]
        return sides
