"""The numbers every cost model comes down to: what modules cost on a grid of micro-batch shapes.

A model is a list of modules, a stage a part of it. Modules of one kind cost the same:

    GPT        attention  mlp  attention  mlp  …  head
    experts    attention  mlp  attention  expert mlp  …  head
    T5         attention  mlp  …  decoder attention  decoder mlp  …  head

All planning costs are read from such a grid by integer multilinear interpolation, in Python here and in the native
core, with the same rounding; so a plan is the same on every machine and no search step calls back into a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import CostModelError

IntArray = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ABSENT = -1
"""Marks a grid point that was never measured or did not fit; every other value is at least 0."""

LARGEST_COST = 2**42
"""The limit on every cost, of a module and of a stage: 73 minutes in ns, 4.4 TB in bytes. A module's cost above it is
refused; a stage's makes the micro-batch infeasible. It keeps sums over modules and interpolation within 64 bits."""

LARGEST_COORDINATE = 2**20
"""The limit on the grid's axes: samples of a micro-batch, and its padded lengths."""

Kind = str
"""The kind of a module. Cost models may have others than these."""

ATTENTION: Kind = "attention"
MLP: Kind = "mlp"
EXPERT_MLP: Kind = "expert mlp"
"""An MLP of experts, in a model that has others, too."""
DECODER_ATTENTION: Kind = "decoder attention"
"""Self- and cross-attention of a T5's decoder."""
DECODER_MLP: Kind = "decoder mlp"
HEAD: Kind = "head"
"""The output head and the loss together, once per model."""

LARGEST_RATE = 2**30
PEAK_UNIT = 64
"""Integers of `Peak` in a byte, but for `once`."""
WEIGHT_UNIT = 1024
"""Integers of `WeightTime` in a ns, but for the first."""
_Rate = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_RATE)]
_Once = Annotated[int, msgspec.Meta(ge=0, le=2**42)]
LayerKind = Literal["encoder", "decoder", "expert"]
"""The kind of a layer; a decoder-only model's are encoder layers, and expert layers where only some have experts."""
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)


class Quantity(IntEnum):
    """The quantities that a grid holds of a module; times in nanoseconds, activations in bytes.

    A stage's times and what it stores are the sums of its modules'; its peak is the highest of theirs, each above what
    the modules before it store.
    """

    FORWARD = 0
    BACKWARD = 1
    STORED = 2
    PEAK = 3
    WEIGHT = 4
    """The part of the backward that a divided pass runs as its second half; 0 where passes cannot be divided."""
    ENTRY_STORED = 5
    """Further activations of a stage that begins with the module: the encoder's output under a decoder's module, and
    under full recomputation an MLP's own input, which is the attention's output elsewhere."""
    ENTRY_PEAK = 6
    """The peak of a stage that begins with the module, while that runs."""


PREFIX_QUANTITIES = (Quantity.FORWARD, Quantity.BACKWARD, Quantity.STORED, Quantity.PEAK)
"""The quantities of attention that a piece of a sample adds to."""
PREFIX_UNIT = 2**24
"""Integers of `PackedTables.prefix` in a ns or a byte."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTables:
    """Modules' costs in packed rows: a part that is linear in the row's positions, and attention of each sample.

    A row costs `linear` at its positions, and the sum over its samples of `attention` at theirs.

    Attributes:
        row_inputs, row_targets: positions of a row, strictly increasing; `row_targets` is `[0]` for decoder-only.
        linear: int64 `[kinds, len(Quantity), row_inputs, row_targets]`, `ABSENT` where it is not known.
        inputs, targets: positions of a sample, likewise.
        attention: int64 `[kinds, len(Quantity), inputs, targets]`.
        prefix: int64 `[len(PREFIX_QUANTITIES), 3]` in 1 / `PREFIX_UNIT`, what a piece of n positions after m earlier
            ones costs more than a whole sample: once, times m, and times m · n. None if that was not measured.
    """

    row_inputs: IntArray
    row_targets: IntArray
    linear: IntArray
    inputs: IntArray
    targets: IntArray
    attention: IntArray
    prefix: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndState:
    """Parameter bytes (2 bytes each) of what is outside of layers, other than the word embeddings, on one rank.

    Attributes:
        tied: whether the head's weight is the word embeddings': a copy, on a stage that does not have these.
        positions: bytes of learned positions, on every stage with word embeddings.
        encoder_tables, decoder_tables: bytes of relative biases, on every stage with such layers.
        norm: bytes of the norm after the last layer of each stack.
        head_biases: bytes of the head's biases.
    """

    tied: bool
    positions: int = 0
    encoder_tables: int = 0
    decoder_tables: int = 0
    norm: int = 0
    head_biases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Parameter bytes (2 bytes each) on one tensor-parallel rank.

    Attributes:
        modules: bytes of one module of each kind but the head; if nobody knows how a layer's bytes are divided,
            attention has all of them.
        embedding_bytes: the word embeddings.
        expert_bytes: the experts in a module that has them; they are a part of the module's.
        expert_parallel: ranks that share them; `expert_bytes` are one rank's.
        ends: what is outside of layers; None if it is not known, as in files, for which the published rule counts
            the word embeddings alone.
        gradient_bytes: one parameter's gradient; Megatron adds gradients of half precision up in fp32, the
            published rule counts 2.
        trained: the bytes of `modules` that have gradients and states of the optimizer, if all others are frozen; None
            if nothing is frozen.
    """

    modules: Mapping[Kind, int]
    embedding_bytes: int
    ends: EndState | None = None
    gradient_bytes: int = 2
    expert_bytes: int = 0
    expert_parallel: int = 1
    trained: Mapping[Kind, int] | None = None

    @property
    def expert_kind(self) -> Kind | None:
        """The modules that hold experts, if there are any."""
        if not self.expert_bytes:
            return None
        return EXPERT_MLP if EXPERT_MLP in self.modules else MLP


class Rates(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rates in any unit, as only their proportion counts: `linear` and `mlp` by position, `inner` by position and key,
    `memory` by position of the encoder's output."""

    linear: _Rate
    inner: _Rate
    mlp: _Rate
    memory: _Rate = 0


class Peak(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """High-water mark of half a layer: bytes that it takes once, such as a weight's gradient, and in bytes /
    `PEAK_UNIT` `linear` by position, `inner` by position and key, `memory` by position of the encoder's output."""

    once: _Once
    linear: _Once
    inner: _Once
    memory: _Once = 0


WeightTime = tuple[_Once, _Once, _Once]
"""Time of a layer's weight gradients: ns once, and in ns / `WEIGHT_UNIT` by position, and by position of the encoder's
output."""


class Division(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The division of one kind of layer under one recompute mode.

    Attributes:
        forward, backward: how times are divided.
        stored: how activations are divided: attention stores by the first rates, the MLP by the second.
        peak: attention's and the MLP's; neither is above the layer's, which counts for both if this is None.
        parameters: attention's and the MLP's, in any unit.
        weights: time of weight gradients; None where it was not measured: the forward time of attention's linears and
            MLP, which multiply as often.
    """

    forward: Rates
    backward: Rates
    stored: tuple[Rates, Rates]
    peak: tuple[Peak, Peak] | None = None
    parameters: tuple[_Rate, _Rate]
    weights: WeightTime | None = None

    def __post_init__(self) -> None:
        if not any(self.parameters):
            raise ValueError("expected parameters of attention or of the MLP above 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTables:
    """Modules' costs under one tensor parallelism and recompute mode.

    Attributes:
        kinds: the kinds of modules; in the first, pieces of samples attend to earlier ones.
        sizes, inputs, targets: the grid's axes, strictly increasing; `targets` is `[0]` for decoder-only models.
        values: int64 `[kinds, len(Quantity), sizes, inputs, targets]`, `ABSENT` in every row of a point that does not
            fit.
        state: the modules' parameter bytes.
        separate: the values, `ABSENT` from each row by itself: costs of packed rows are derived from them. None where
            they do not differ from `values`.
        packed: costs of packed rows; None where they are derived from `separate`.
        peak_covers_backward: the peaks cover forward and backward, and count while either runs; else they cover the
            forward alone.
        key_value_channels: channels of a position's keys in one layer on one tensor-parallel rank (heads or query
            groups × channels of each); its values have as many. 0 where the model is not known so well.
        exchange_bytes: that a position's states take on their way to its experts; 0 where there are none.
        division: how the layers of an encoder or of a decoder-only model were divided into modules; None where one of
            the two has all of a layer, and where there are no layers.
    """

    kinds: tuple[Kind, ...]
    sizes: IntArray
    inputs: IntArray
    targets: IntArray
    values: IntArray
    state: ModelState
    separate: IntArray | None = None
    packed: "PackedTables | None" = None
    peak_covers_backward: bool = False
    key_value_channels: int = 0
    exchange_bytes: int = 0
    division: Division | None = None

    def __post_init__(self) -> None:
        for name in ("sizes", "inputs", "targets"):
            axis = getattr(self, name)
            if axis.ndim != 1 or not len(axis) or (np.diff(axis) <= 0).any() or axis[0] < 0:
                raise CostModelError(f"the grid's {name} must increase from 0 or more, got {axis.tolist()}")
            if axis[-1] > LARGEST_COORDINATE:
                raise CostModelError(f"the grid's {name} must be at most {LARGEST_COORDINATE}, got {axis[-1]}")
        if self.values.max() > LARGEST_COST:
            raise CostModelError(
                f"costs must be at most {LARGEST_COST} ns or bytes (73 minutes, 4.4 TB), got {self.values.max()}"
            )

    def at_lengths(self, inputs: IntArray, targets: IntArray, *, separate: bool = False) -> IntArray:
        """Costs at every size of the grid for queries of given lengths: `[queries, kinds, len(Quantity), sizes]`.

        With `separate`, from the separate values. Lengths below the grid cost what its smallest does, an upper bound;
        lengths above it are `ABSENT`.
        """
        values = self.separate if separate and self.separate is not None else self.values
        planes = values.reshape(-1, *values.shape[3:])
        costs = at_point(planes, self.inputs, self.targets, inputs, targets)
        return costs.reshape(len(inputs), *values.shape[:3])

    def at_sizes(self, by_size: IntArray, sizes: IntArray) -> IntArray:
        """Costs at the given sizes from `[queries, …, sizes of the grid]`: `[queries, …]`, `ABSENT` outside."""
        rows = by_size.reshape(len(sizes), -1, by_size.shape[-1])
        low, part, width = _locate(self.sizes, sizes)
        query = np.arange(len(sizes))
        high = _above(low, self.sizes)
        costs = _lerp(rows[query, :, low], rows[query, :, high], part, width)
        too_large = sizes > self.sizes[-1]
        return np.where(too_large[:, None], ABSENT, costs).reshape(by_size.shape[:-1])


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
    part = part[:, None]
    width = width[:, None]
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
    values = _lerp(at_low, at_high, part_y, width_y)
    outside = (x > first[-1]) | (y > second[-1])
    return np.where(outside[:, None], ABSENT, values)


def increasing(values: Sequence[int]) -> IntArray:
    """The distinct values as a grid axis."""
    return np.array(sorted(set(values)), dtype=np.int64)
