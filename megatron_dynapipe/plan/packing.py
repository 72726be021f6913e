"""Where the samples of a packed row lie.

    input    a a a b b c c c c . . . .      offsets 0 3 5 9, shape [1, 16, …]: rounded up to 8, or as settings ask
    target   a a b b b c c . …              offsets 0 2 5 7, positions counted as in `units.target_positions`

Sample i, or its piece, has positions offsets[i] to offsets[i + 1]; what is left fills the row up, and trains on
nothing.
"""

from itertools import accumulate
from typing import NamedTuple

from megatron_dynapipe.plan.iteration import MicroBatch
from megatron_dynapipe.units import LENGTH_MULTIPLE, ModelFamily, Shape, round_up, target_positions


class RowOffsets(NamedTuple):
    """First position of every sample of a packed row, and the end of the last: one more than there are samples."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    """All 0 for decoder-only models."""


def row_offsets(family: ModelFamily, micro_batch: MicroBatch) -> RowOffsets:
    """Where the samples of a packed micro-batch begin in its input and its target row."""
    targets = (target_positions(family, tokens) for tokens in micro_batch.target_lengths)
    return RowOffsets(
        inputs=tuple(accumulate(micro_batch.positions(family), initial=0)),
        targets=tuple(accumulate(targets, initial=0)),
    )


def least_shape(family: ModelFamily, micro_batch: MicroBatch) -> Shape:
    """The least shape of a packed micro-batch's row: `[1, inputs, targets]`."""
    offsets = row_offsets(family, micro_batch)
    return Shape(1, round_up(offsets.inputs[-1]), round_up(offsets.targets[-1]))


def holds_row(family: ModelFamily, micro_batch: MicroBatch) -> bool:
    """Whether a packed micro-batch's shape has room for its samples; rows may be longer than their samples need."""
    least = least_shape(family, micro_batch)
    shape = micro_batch.shape
    lengths = zip(least[1:], shape[1:], strict=True)
    fits = all(needed <= room and room % LENGTH_MULTIPLE == 0 for needed, room in lengths)
    return fits and (shape.target_length == 0) == (least.target_length == 0)
