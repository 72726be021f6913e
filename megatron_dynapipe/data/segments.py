"""The places of samples in a micro-batch; in a packed row in the form that attention over it takes.

    row         a a a b b c c c c . . .      rounded up; the tail is a segment of its own
    offsets     0     3   5       9     12   one more than there are segments
    positions   0 1 2 0 1 0 1 2 3 0 1 2      they start again with every segment

Every row has a last segment for its tail, which may be empty: then the segments of a T5's two rows match one to one.
A segment may be a piece of a sample: its positions go on from the pieces before it, whose keys it attends to.

Rows of padded samples have masks instead, in the form of Megatron's local layers: True where attention is forbidden.
They depend on the key alone (and causality), never on whether the query is padding:

    encoder, input of 2, s = 4        decoder, 2 positions, t = 4
      query 0   . . x x                 query 0   . x x x
      query 1   . . x x                 query 1   . . x x
      padding   . . x x                 padding   . . x x
      padding   . . x x                 padding   . . x x

So no row forbids everything (a softmax over nothing would be NaN), no query ever looks at a padding key, and what
padding queries compute reaches neither real positions nor the loss. The masks are views that repeat one row or one
triangle where they can; do not write to them. Lengths are int[b], real positions of each sample, at least 1; their
device is the mask's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.plan import MicroBatch, holds_row, least_shape, row_offsets
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, input_positions
from megatron_dynapipe.ways.chains import cut_entries


class CutSegment(NamedTuple):
    """A segment that is a piece of a sample.

    Attributes:
        sample: which, by its number in the dataset.
        start: positions of it that earlier pieces hold.
        followed: whether a later piece attends to its keys.
    """

    sample: int
    start: int
    followed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSegments:
    """The segments of one packed row, on the host.

    Attributes:
        offsets: int32[segments + 1], the first position of every segment, and the row's length.
        positions: int64[1, length], each position's place in its segment.
        lengths: positions of every segment; the last is the tail's.
        cuts: those that are pieces of samples, by their number.
        key_offsets: `offsets` of the keys that segments attend to, earlier pieces' or chunks' included; None without
            cuts or shares.
        key_places: int64[keys] of shares (`data.shares`), where each key is among the keys of all members.
        ranks: members of the team.
    """

    offsets: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    cuts: Mapping[int, CutSegment] = field(default_factory=dict)
    key_offsets: Tensor | None = None
    key_places: Tensor | None = None
    ranks: int = 1

    @property
    def longest(self) -> int:
        """Positions of the longest segment."""
        return max(self.lengths)

    @property
    def most_keys(self) -> int:
        """Keys of the segment that attends to the most."""
        return self.longest if self.key_offsets is None else int(self.key_offsets.diff().max())

    @classmethod
    def of(cls, starts: Sequence[int], length: int, cuts: Mapping[int, CutSegment] | None = None) -> "RowSegments":
        """The segments of a row of `length` positions, from where its samples begin and where the last one ends.

        Raises:
            PlanError: the samples do not lie one after another within the row.
        """
        offsets = np.array([*starts, length], np.int32)
        lengths = np.diff(offsets)
        if offsets[0] != 0 or (lengths[:-1] < 1).any() or lengths[-1] < 0:
            raise PlanError(
                f"expected offsets that rise from 0 to at most the row's {length} positions, got {list(starts)}"
            )
        before = np.zeros_like(lengths)
        for segment, cut in (cuts or {}).items():
            before[segment] = cut.start
        positions = np.arange(length) - np.repeat(offsets[:-1] - before, lengths)
        keys = np.array([0, *accumulate((lengths + before).tolist())], np.int32)
        return cls(
            offsets=torch.from_numpy(offsets),
            positions=torch.from_numpy(positions[None]),
            lengths=tuple(lengths.tolist()),
            cuts=cuts or {},
            key_offsets=torch.from_numpy(keys) if cuts else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """The place at which each sample begins among a micro-batch's positions, counted through all its rows."""

    input_starts: Sequence[int]
    target_starts: Sequence[int]
    input_segments: RowSegments | None = None
    target_segments: RowSegments | None = None

    @classmethod
    def of(cls, index: int, family: ModelFamily, plan: MicroBatch) -> Self:
        """A row for each sample, or the offsets in a packed row; raises PlanError if those do not cover it."""
        size, input_length, target_length = plan.shape
        if plan.layout is BatchLayout.PADDED:
            inputs, targets = ([row * length for row in range(size)] for length in (input_length, target_length))
            return cls(input_starts=inputs, target_starts=targets)
        if not holds_row(family, plan):
            expected = least_shape(family, plan)
            raise PlanError(
                f"micro-batch {index}: expected a packed row of shape {expected} or longer for its "
                f"{len(plan.sample_ids)} samples, got {plan.shape}"
            )
        offsets = row_offsets(family, plan)
        cuts = {}
        for at, piece in cut_entries(plan):
            followed = piece.end < input_positions(family, plan.input_lengths[at])
            cuts[at] = CutSegment(plan.sample_ids[at], piece.start, followed)
        return cls(
            input_starts=offsets.inputs[:-1],
            target_starts=offsets.targets[:-1],
            input_segments=RowSegments.of(offsets.inputs, input_length, cuts),
            target_segments=RowSegments.of(offsets.targets, target_length) if target_length else None,
        )


def put(array: npt.NDArray[Any] | None, first: int, values: npt.ArrayLike) -> None:
    """Write values into an array's rows from a position on, where the stage has the array."""
    if array is not None:
        written = np.asarray(values)
        array.reshape(-1)[first : first + len(written)] = written


def check_fits(index: int, plan: MicroBatch, what: str, positions: npt.NDArray[np.int32], length: int) -> None:
    """Every sample's real positions lie within the padded shape, and there is at least one."""
    if not plan.is_filler and (int(positions.max()) > length or int(positions.min()) < 1):
        at = int(np.argmax((positions > length) | (positions < 1)))
        raise PlanError(
            f"micro-batch {index} of shape {plan.shape}: expected 1…{length} {what} positions,"
            f" sample {plan.sample_ids[at]} needs {positions[at]}"
        )


def encoder_mask(input_lengths: Tensor, length: int) -> Tensor:
    """Self-attention of the encoder: bool[b, 1, length, length]."""
    return cross_mask(input_lengths, length, length)


def cross_mask(input_lengths: Tensor, target_length: int, input_length: int) -> Tensor:
    """Attention of the decoder to the encoder's output: bool[b, 1, target_length, input_length]."""
    return _padding(input_lengths, input_length).expand(-1, -1, target_length, -1)


def decoder_mask(decoder_lengths: Tensor, length: int) -> Tensor:
    """Self-attention of the decoder, causal and without padding keys: bool[b, 1, length, length]."""
    return _padding(decoder_lengths, length) | causal_mask(length, decoder_lengths.device)


def causal_mask(length: int, device: torch.device | str) -> Tensor:
    """Self-attention of a decoder-only model: bool[1, 1, length, length].

    Padding stands at the end of a sequence, where causality already hides it from every real position.
    """
    positions = torch.arange(length, device=device)
    return (positions[None, :] > positions[:, None])[None, None]


def _padding(lengths: Tensor, length: int) -> Tensor:
    """Mask of keys that are padding: bool[b, 1, 1, length]."""
    positions = torch.arange(length, device=lengths.device)
    return (positions[None, :] >= lengths[:, None])[:, None, None, :]
