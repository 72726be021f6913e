"""The numbers every cost model comes down to: one layer's costs on a grid of micro-batch shapes.

All planning costs are read from such a grid by integer multilinear interpolation, in Python here and in the native
core, with the same rounding; so a plan is the same on every machine and no search step calls back into a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.division import Division, Kind
from megatron_dynapipe.errors import CostModelError

IntArray = npt.NDArray[np.int64]

ABSENT = -1
"""Marks a grid point that was never measured or did not fit; every other value is at least 0."""

LARGEST_COST = 2**42
"""The limit on every cost, of a layer and of a stage: 73 minutes in ns, 4.4 TB in bytes. A layer's cost above it is
refused; a stage's makes the micro-batch infeasible. It keeps sums over layers and interpolation within 64 bits."""

LARGEST_COORDINATE = 2**20
"""The limit on the grid's axes: samples of a micro-batch, and its padded lengths."""


class Row(IntEnum):
    """What each row of a grid holds; times in nanoseconds, activations in bytes.

    A decoder-only model's layers are called encoder layers, and its decoder rows are zero; where only some have
    experts, these are called expert layers, and have the decoder's rows. `HEAD` is the output head
    and the loss together, once per model. `ENCODED_STORED` is the encoder's output, which a stage of decoder layers
    alone keeps once, beside what its layers keep. `WEIGHT` is the part of the backward that a divided pass runs as its
    second half; 0 where passes cannot be divided.

    The last rows are of halves of layers: attention (a T5 decoder's self- and cross-attention, with their norms), and
    the MLP, which takes the rest of the layer's time. Where costs of halves are not known they are zero
    (`LayerTables.division` is empty).
    """

    ENCODER_FORWARD = 0
    ENCODER_BACKWARD = 1
    ENCODER_STORED = 2
    ENCODER_PEAK = 3
    DECODER_FORWARD = 4
    DECODER_BACKWARD = 5
    DECODER_STORED = 6
    DECODER_PEAK = 7
    HEAD_FORWARD = 8
    HEAD_BACKWARD = 9
    HEAD_STORED = 10
    HEAD_PEAK = 11
    ENCODED_STORED = 12
    ENCODER_WEIGHT = 13
    DECODER_WEIGHT = 14
    ENCODER_ATTENTION_FORWARD = 15
    ENCODER_ATTENTION_BACKWARD = 16
    ENCODER_ATTENTION_STORED = 17
    ENCODER_ATTENTION_PEAK = 18
    ENCODER_MLP_STORED = 19
    ENCODER_MLP_PEAK = 20
    ENCODER_ATTENTION_WEIGHT = 21
    DECODER_ATTENTION_FORWARD = 22
    DECODER_ATTENTION_BACKWARD = 23
    DECODER_ATTENTION_STORED = 24
    DECODER_ATTENTION_PEAK = 25
    DECODER_MLP_STORED = 26
    DECODER_MLP_PEAK = 27
    DECODER_ATTENTION_WEIGHT = 28

    EXPERT_FORWARD = DECODER_FORWARD
    EXPERT_BACKWARD = DECODER_BACKWARD
    EXPERT_STORED = DECODER_STORED
    EXPERT_PEAK = DECODER_PEAK
    EXPERT_WEIGHT = DECODER_WEIGHT
    EXPERT_ATTENTION_FORWARD = DECODER_ATTENTION_FORWARD
    EXPERT_ATTENTION_BACKWARD = DECODER_ATTENTION_BACKWARD
    EXPERT_ATTENTION_STORED = DECODER_ATTENTION_STORED
    EXPERT_ATTENTION_PEAK = DECODER_ATTENTION_PEAK
    EXPERT_MLP_STORED = DECODER_MLP_STORED
    EXPERT_MLP_PEAK = DECODER_MLP_PEAK
    EXPERT_ATTENTION_WEIGHT = DECODER_ATTENTION_WEIGHT


ENCODER_ROWS = (Row.ENCODER_FORWARD, Row.ENCODER_BACKWARD, Row.ENCODER_STORED, Row.ENCODER_PEAK)
"""What a piece of a sample adds to; the head has no attention."""
PREFIX_UNIT = 2**24
"""Integers of `PackedTables.prefix` in a ns or a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndState:
    """Parameter bytes (2 bytes each) of what is outside layers, besides the word embeddings, on one rank.

    Attributes:
        tied: whether the head's weight is the word embeddings': a copy, on a stage that does not have these.
        positions: of learned positions, on every stage with word embeddings.
        encoder_tables, decoder_tables: of relative biases, on every stage with such layers.
        norm: after the last layer of each stack.
        head_biases: of the head.
    """

    tied: bool
    positions: int = 0
    encoder_tables: int = 0
    decoder_tables: int = 0
    norm: int = 0
    head_biases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """Parameter bytes (2 bytes each) of one layer of each kind on one tensor-parallel rank.

    Attributes:
        embedding_bytes: of the word embeddings.
        encoder_bytes, decoder_bytes: of a layer; the latter of expert layers, where a model has both kinds.
        encoder_attention_bytes, decoder_attention_bytes: of its attention; 0 where costs of halves are not known.
        expert_bytes: of the experts in a layer that has them, part of it.
        expert_parallel: ranks that share them; `expert_bytes` are those of one.
        ends: of the rest; None where it is not known, as in files, for which the published rule counts the word
            embeddings alone.
        gradient_bytes: of one parameter's gradient; Megatron adds gradients of half precision up in fp32, the
            published rule counts 2.
    """

    embedding_bytes: int
    encoder_bytes: int
    decoder_bytes: int = 0
    ends: EndState | None = None
    gradient_bytes: int = 2
    encoder_attention_bytes: int = 0
    decoder_attention_bytes: int = 0
    expert_bytes: int = 0
    expert_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTables:
    """One layer's costs in packed rows: a part that is linear in the row's positions, and attention of each sample.

    A row costs `linear` at its positions, and the sum over its samples of `attention` at theirs.

    Attributes:
        row_inputs, row_targets: positions of a row, strictly increasing; `row_targets` is `[0]` for decoder-only.
        linear: int64 `[len(Row), row_inputs, row_targets]`, `ABSENT` where it is not known.
        inputs, targets: positions of a sample, likewise.
        attention: int64 `[len(Row), inputs, targets]`.
        prefix: int64 `[len(ENCODER_ROWS), 3]` in 1 / `PREFIX_UNIT`, what a piece of n positions after m earlier ones
            costs besides: once, times m, and times m · n. None where that was not measured.
        division: how the costs of each kind of layer are divided in packed rows; empty where that was not measured, and
            then as those of padded micro-batches.
    """

    row_inputs: IntArray
    row_targets: IntArray
    linear: IntArray
    inputs: IntArray
    targets: IntArray
    attention: IntArray
    prefix: IntArray | None = None
    division: Mapping[Kind, Division] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, axes in (("linear", ("row_inputs", "row_targets")), ("attention", ("inputs", "targets"))):
            expected = (len(Row), *(len(getattr(self, axis)) for axis in axes))
            if getattr(self, name).shape != expected:
                raise CostModelError(
                    f"packed {name} costs must have the shape {expected}, got {getattr(self, name).shape}"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTables:
    """One layer's costs under one tensor parallelism and recompute mode.

    Attributes:
        sizes, inputs, targets: the grid's axes, strictly increasing; `targets` is `[0]` for decoder-only models.
        values: int64 `[len(Row), sizes, inputs, targets]`, `ABSENT` in every row of a point that does not fit.
        state: parameter bytes of a layer.
        separate: the values, `ABSENT` from each row by itself: costs of packed rows are derived from them. None where
            they do not differ from `values`.
        packed: costs of packed rows; None where they are derived from `separate`.
        peak_covers_backward: the peaks are those of the forward and of the backward, and count while either runs;
            else those of the forward alone.
        key_value_channels: channels of a position's keys in one layer on one tensor-parallel rank (heads or query
            groups × channels of each); its values have as many. 0 where the model is not known so well.
        of_stages: int64 `[virtual stages, len(Row), sizes, inputs, targets]`, where the layers of stages differ: what
            one layer of each stage costs, absent where `values` are. None where all layers cost `values`.
        exchange_bytes: that a position's states take on their way to its experts; 0 where there are none.
        division: how the costs of each kind of layer are divided; empty where the model is not known so well, and then
            the rows of halves are 0.
    """

    sizes: IntArray
    inputs: IntArray
    targets: IntArray
    values: IntArray
    state: LayerState
    separate: IntArray | None = None
    packed: "PackedTables | None" = None
    peak_covers_backward: bool = False
    key_value_channels: int = 0
    of_stages: IntArray | None = None
    exchange_bytes: int = 0
    division: Mapping[Kind, Division] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("sizes", "inputs", "targets"):
            axis = getattr(self, name)
            if axis.ndim != 1 or not len(axis) or (np.diff(axis) <= 0).any() or axis[0] < 0:
                raise CostModelError(f"the grid's {name} must increase from 0 or more, got {axis.tolist()}")
            if axis[-1] > LARGEST_COORDINATE:
                raise CostModelError(f"the grid's {name} must be at most {LARGEST_COORDINATE}, got {axis[-1]}")
        expected = (len(Row), len(self.sizes), len(self.inputs), len(self.targets))
        if self.values.shape != expected:
            raise CostModelError(f"the grid's values must have the shape {expected}, got {self.values.shape}")
        if self.values.min() < ABSENT or self.values.max() > LARGEST_COST:
            raise CostModelError(
                f"costs must lie between 0 and {LARGEST_COST} ns or bytes (73 minutes, 4.4 TB),"
                f" got {self.values.min()} to {self.values.max()}"
            )
        absent = self.values == ABSENT
        if (absent.any(axis=0) != absent.all(axis=0)).any():
            raise CostModelError("a grid point must be absent from all rows or from none")
        separate = None if self.separate is None else self.separate.shape
        by_stage = None if self.of_stages is None else self.of_stages.shape[1:]
        for what, shape in (("separate values", separate), ("values of a stage", by_stage)):
            if shape not in (None, expected):
                raise CostModelError(f"the grid's {what} must have the shape {expected}, got {shape}")

    def at_lengths(self, inputs: IntArray, targets: IntArray, *, separate: bool = False) -> IntArray:
        """Costs at every size of the grid for queries of given lengths: `[queries, len(Row), sizes]`.

        With `separate`, from the separate values. Lengths below the grid cost what its smallest does, an upper bound;
        lengths above it are `ABSENT`.
        """
        values = self.separate if separate and self.separate is not None else self.values
        return self._interpolated(values, inputs, targets)

    def of_stages_at_lengths(self, inputs: IntArray, targets: IntArray) -> IntArray:
        """`at_lengths` by virtual stage: `[queries, virtual stages, len(Row), sizes]`; 1 for all whose layers agree."""
        by_stage = self.values[None] if self.of_stages is None else self.of_stages
        return np.stack([self._interpolated(values, inputs, targets) for values in by_stage], axis=1)

    def _interpolated(self, values: IntArray, inputs: IntArray, targets: IntArray) -> IntArray:
        planes = values.reshape(-1, *values.shape[2:])
        found = at_point(planes, self.inputs, self.targets, inputs, targets)
        return found.reshape(len(inputs), *values.shape[:2])

    def at_sizes(self, by_size: IntArray, sizes: IntArray) -> IntArray:
        """Costs at the given sizes from `[queries, rows, sizes of the grid]`: `[queries, rows]`, `ABSENT` outside."""
        low, part, width = _locate(self.sizes, sizes)
        query = np.arange(len(sizes))
        costs = _lerp(by_size[query, :, low], by_size[query, :, _above(low, self.sizes)], part, width)
        return np.where((sizes > self.sizes[-1])[:, None], ABSENT, costs)


def _above(low: IntArray, axis: IntArray) -> IntArray:
    return np.minimum(low + 1, len(axis) - 1)


def _locate(axis: IntArray, x: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The cell of each x: index of its lower end, distance from there, and its width (1 at a grid point)."""
    x = np.clip(x, axis[0], axis[-1])
    low = np.searchsorted(axis, x, side="right") - 1
    part = x - axis[low]
    width = np.where(part > 0, axis[_above(low, axis)] - axis[low], 1)
    return low.astype(np.int64), part.astype(np.int64), width.astype(np.int64)


def _lerp(low: IntArray, high: IntArray, part: IntArray, width: IntArray) -> IntArray:
    """low + (high - low) · part / width, rounded to the nearest; `ABSENT` where an end with weight is.

    The ends are `[queries, n]`, `part` and `width` `[queries]`.
    """
    part, width = part[:, None], width[:, None]
    value = low + ((high - low) * part + width // 2) // width
    absent = (low == ABSENT) | ((part > 0) & (high == ABSENT))
    return np.where(absent, ABSENT, value)


def at_point(plane: IntArray, first: IntArray, second: IntArray, x: IntArray, y: IntArray) -> IntArray:
    """Values of `[rows, first, second]` at queries (x, y): `[queries, rows]`, `ABSENT` above the axes."""
    low_x, part_x, width_x = _locate(first, x)
    low_y, part_y, width_y = _locate(second, y)
    along = np.moveaxis(plane, 0, -1)  # [first, second, rows]
    high_x, high_y = _above(low_x, first), _above(low_y, second)
    at_low = _lerp(along[low_x, low_y], along[high_x, low_y], part_x, width_x)
    at_high = _lerp(along[low_x, high_y], along[high_x, high_y], part_x, width_x)
    outside = (x > first[-1]) | (y > second[-1])
    return np.where(outside[:, None], ABSENT, _lerp(at_low, at_high, part_y, width_y))


def increasing(values: Sequence[int]) -> IntArray:
    """The distinct values as a grid axis."""
    return np.array(sorted(set(values)), dtype=np.int64)
