"""Costs computed from a model's shape and a device's rates, for machines on which nothing has been measured.

Rates of known devices are an A100's (`A100_RATES`, fitted to published profiles), in proportion to what devices reach:
products as the best of any shape that was measured (stas00/ml-engineering, compute/accelerator, 744d01e of 2026-08-22),
else as on the data sheet; memory traffic is 0.52 of the data sheet's bandwidth. Links carry what collectives were
measured at: 200 of 300 GB/s between A100s (nccl-tests #149), 370 of 450 between H100s (nccl-tests #212), else two
thirds of the data sheet's figure. The overhead is launching a layer's kernels, which depends on the host more
than on the device; a run measures its own (`--dynapipe-calibrate`).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from megatron_dynapipe.core.costs import (
    ABSENT,
    LARGEST_COORDINATE,
    PREFIX_QUANTITIES,
    CostTables,
    Division,
    Floats,
    IntArray,
    LayerKind,
    PackedTables,
    Quantity,
)
from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing.counted import divisions_of
from megatron_dynapipe.costing.modules import Dividing, Layers, Part, kinds_of
from megatron_dynapipe.costing.shape import ModelShape
from megatron_dynapipe.costing.state import state_of
from megatron_dynapipe.costing.work import LayerWork, Workload

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NonNegative = Annotated[float, msgspec.Meta(ge=0)]

_PEAK_CORE = 0.42
_PEAK_SHARED = 0.4
"""The weights, in a forward's high-water mark, of attention's inside and of what all tensor-parallel ranks hold; what
they divide counts once: as in published profiles of Megatron's layers."""

_ADDED_PASSES = 3.0
"""Over an adapter's outputs in each pass: its product writes them, they are scaled and added; backward as much."""

_NORM_PASSES = 5
"""Over weights, to compute their norms with an adapter's: B·A is written, added to W, and the sum is read."""

_FITS_NOWHERE = 2**36
"""A layer's time (ns) or memory (bytes) from which a micro-batch counts as infeasible: over a minute, or more than
devices hold. Sums over a stage's layers so stay inside what the planner's core computes with."""


class PeakRatios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """High-water mark of a layer over what its forward works on (`peak_basis`), under each recompute mode.

    Attributes:
        none, selective, full: the ratio of a mode.
        recomputed_core: how much attention's inside counts in it where a mode recomputes attention, against what
            tensor-parallel ranks divide: next to nothing in the published profiles.
    """

    none: _Positive = 1.25
    selective: _Positive = 1.25
    full: _Positive = 1.25
    recomputed_core: _Positive = 0.03

    def of(self, recompute: Recompute) -> float:
        """The ratio of one mode."""
        ratio: float = getattr(self, recompute.value)
        return ratio

    def core(self, recompute: Recompute) -> float:
        """How much attention's inside counts in a mode's high-water mark."""
        return _PEAK_CORE if recompute is Recompute.NONE else self.recomputed_core


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rates that a device sustains.

    A pass takes its products, its memory traffic and its messages one after another, but never less than its kernels
    take to launch; `sharpness` says how suddenly the one takes over from the other.

    Attributes:
        flops_per_second: matrix products, as sustained in training (not the peak on its data sheet).
        bytes_per_second: memory traffic.
        layer_overhead_us: time of one layer's forward that no size of micro-batch goes below.
        element_bytes: bytes of a parameter or activation (2 for half precision, 4 for fp32).
        link_bytes_per_second: messages between tensor-parallel ranks.
        linear_products: of a product with weights, the time over that of others.
        backward_products: a backward's time for products over its forward's; it multiplies twice as much.
        backward_traffic: the same for memory traffic.
        backward_overhead: the same for the overhead.
        sharpness: exponent of the power mean of work and overhead.
        peaks: what a layer's forward needs above what it keeps.
    """

    flops_per_second: _Positive
    bytes_per_second: _Positive
    layer_overhead_us: _NonNegative = 20.0
    element_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2
    link_bytes_per_second: _Positive = 2e11
    linear_products: _Positive = 1.0
    backward_products: _Positive = 2.0
    backward_traffic: _Positive = 2.0
    backward_overhead: _Positive = 1.0
    sharpness: Annotated[float, msgspec.Meta(ge=1)] = 4.0
    peaks: PeakRatios = PeakRatios()


CPU_RATES = DeviceRates(
    flops_per_second=4e10,
    bytes_per_second=1e10,
    layer_overhead_us=200.0,
    element_bytes=4,
    peaks=PeakRatios(recomputed_core=1.0),
)
"""One core of a common server CPU in fp32, where attention with dropout keeps its scores, also when recomputed."""

A100_RATES = DeviceRates(
    flops_per_second=2.2e14,
    bytes_per_second=8e11,
    layer_overhead_us=1500.0,
    backward_products=1.9,
    peaks=PeakRatios(none=4.4, selective=4.4, full=4.3),
)
"""An A100 in half precision, with the overhead of Megatron's unfused layers."""


class AnalyticCostModel:
    """Floating-point operations, bytes and messages of each layer at the device's rates, tabulated on a grid.

    Between grid points costs are interpolated like measured ones; attention's quadratic part comes out up to 3% high.

    Args:
        shape: the model.
        rates: the device.
        max_size: most samples in one micro-batch.
        max_length: longest padded input or target, at most 2^20 positions.
        sequence_parallel: whether tensor-parallel ranks share the activations between attention and feed-forward.

    Raises:
        CostModelError: `max_size` or `max_length` is below 1 or 8.
    """

    def __init__(
        self,
        shape: ModelShape,
        rates: DeviceRates,
        *,
        max_size: int = 4096,
        max_length: int = 16384,
        sequence_parallel: bool = False,
    ) -> None:
        if max_size < 1 or max_length < 8:
            raise CostModelError(f"expected max_size ≥ 1 and max_length ≥ 8, got {max_size} and {max_length}")
        self.shape = shape
        self.rates = rates
        self.name = f"analytic {shape.family}, hidden {shape.hidden}"
        self.family = shape.family
        self._has_decoder = shape.family.is_encoder_decoder
        self.hidden_size: int | None = shape.hidden
        self.links: dict[str, Link] = {}
        self._sequence_parallel = sequence_parallel
        self._rates_of_layers = msgspec.structs.replace(rates, linear_products=0.5) if shape.eight_bits else rates
        identity = msgspec.json.encode(["analytic/7", shape, rates, max_size, max_length, sequence_parallel])
        self.digest = hashlib.blake2b(identity, digest_size=16).hexdigest()
        self._sizes = geometric(1, max_size)
        self._lengths = geometric(8, max_length, between=True)

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        """The computed costs of a combination; raises CostModelError."""
        layer = self.layer_work(tensor_parallel)
        targets = self._lengths if self._has_decoder else np.zeros(1, np.int64)
        b = self._sizes[:, None, None].astype(float)
        s = self._lengths[None, :, None].astype(float)
        t = targets[None, None, :].astype(float)
        divisions = divisions_of(self.shape, recompute)
        dividing = Dividing(
            divisions=divisions,
            inputs=self._lengths,
            targets=targets,
            weights=self._divides(recompute),
            sizes=self._sizes[:, None, None],
            seen=self.shape.seen,
        )
        values = dividing.modules(
            self._layers(layer, b, s, t, partial(layer_costs, rates=self._rates_of_layers, recompute=recompute))
        )
        values[:, :, (values == ABSENT).any(axis=(0, 1))] = ABSENT
        return CostTables(
            kinds=kinds_of(divisions),
            packed=self._packed(layer, recompute, divisions),
            sizes=self._sizes,
            inputs=self._lengths,
            targets=targets,
            values=values,
            state=state_of(self.shape, divisions, tensor_parallel=tensor_parallel),
            peak_covers_backward=True,
            key_value_channels=self.shape.key_value_channels // tensor_parallel,
            exchange_bytes=self._exchange_bytes(tensor_parallel),
            division=divisions["encoder"],
        )

    def _layers(
        self,
        layer: LayerWork,
        b: Floats,
        s: Floats,
        t: Floats,
        costs: Callable[[Workload], Floats],
        *,
        ends: bool = True,
    ) -> Layers:
        """Costs of every kind of layer and, with `ends`, of the head and the encoder's output."""
        works: dict[LayerKind, Workload] = {"encoder": replace(layer, shape=self.shape.dense).encoder(b, s)}
        if self._has_decoder:
            works["decoder"] = layer.decoder(b, t, s)
        elif self.shape.kinds > 1:
            works["expert"] = layer.encoder(b, s)
        by_part: dict[Part, Floats] = {kind: costs(work) for kind, work in works.items()}
        q = t if self._has_decoder else s
        head = layer_costs(layer.head(b, q), self.rates, Recompute.NONE)[:2]
        by_part["postprocess"] = np.stack(np.broadcast_arrays(*head, *layer.head_memory(b, q))) * ends
        grids: dict[tuple[Part, Quantity], Floats] = {
            (part, quantity): values[quantity] for part, values in by_part.items() for quantity in PREFIX_QUANTITIES
        }
        if self._has_decoder:
            grids["encoder_output", Quantity.STORED] = np.asarray(layer.encoder(b, s).input_bytes) * ends
        shape = np.broadcast_shapes(b.shape, s.shape, t.shape)
        return {place: _counted(np.broadcast_to(values, shape)) for place, values in grids.items()}

    def _packed(self, layer: LayerWork, recompute: Recompute, divisions: Mapping[LayerKind, Division]) -> PackedTables:
        """Packed rows counted exactly: all work but attention's inside over the row, that over each sample."""
        rows = geometric(8, min(int(self._lengths[-1]) * 16, LARGEST_COORDINATE), between=True)
        grids = []
        for inputs, inside in ((rows, False), (self._lengths, True)):
            targets = inputs if self._has_decoder else np.zeros(1, np.int64)
            one, s, t = np.ones((1, 1)), inputs[:, None].astype(float), targets[None, :].astype(float)
            costs = partial(_inside if inside else _outside, rates=self._rates_of_layers, recompute=recompute)
            dividing = Dividing(
                divisions=divisions,
                inputs=inputs,
                targets=targets,
                weights=not inside and self._divides(recompute),
                linear=not inside,
                inside=inside,
                seen=self.shape.seen,
            )
            grids.append((inputs, targets, dividing.modules(self._layers(layer, one, s, t, costs, ends=not inside))))
        (row_inputs, row_targets, linear), (inputs, targets, attention) = grids
        return PackedTables(
            row_inputs=row_inputs,
            row_targets=row_targets,
            linear=linear,
            inputs=inputs,
            targets=targets,
            attention=attention,
        )

    def _exchange_bytes(self, tensor_parallel: int) -> int:
        """Tensor-parallel ranks have parts of a position's states each, or all of them the same."""
        if self.shape.experts is None:
            return 0
        shared = tensor_parallel if self._sequence_parallel else 1
        return self.shape.experts.per_token * self.shape.hidden * self.rates.element_bytes // shared

    def _divides(self, recompute: Recompute) -> bool:
        """Whether a backward pass has a second half; without gradients of most weights it is not worth one."""
        return recompute is not Recompute.FULL and self.shape.adapters is None

    def layer_work(self, tensor_parallel: int) -> LayerWork:
        """The work of this model's layers; raises CostModelError if its heads or query groups cannot be shared so."""
        shape = self.shape
        for number, what in ((shape.heads, "attention heads"), (shape.query_groups, "query groups")):
            if tensor_parallel < 1 or number % tensor_parallel:
                raise CostModelError(f"tensor parallelism must divide the {number} {what}, got {tensor_parallel}")
        return LayerWork(
            shape=self.shape,
            tensor_parallel=tensor_parallel,
            sequence_parallel=self._sequence_parallel,
            element_bytes=self.rates.element_bytes,
        )


def layer_costs(work: Workload, rates: DeviceRates, recompute: Recompute) -> Floats:
    """Rows forward, backward (ns), stored, peak (bytes) of some work, over its shape."""
    forward = _time(work, rates)
    backward = _time(work, rates, backward=True)
    everything = work.kept_bytes + work.core_bytes
    stored = everything
    if recompute is Recompute.FULL:
        backward, stored = backward + forward, work.input_bytes
    elif recompute is Recompute.SELECTIVE:
        core = work.core_flops / rates.flops_per_second + work.core_bytes / rates.bytes_per_second
        backward, stored = backward + core, work.kept_bytes
    peak = np.maximum(rates.peaks.of(recompute) * peak_basis(work, rates.peaks, recompute), stored)
    peak = peak + work.norm_bytes  # one linear's sum of W and B·A, twice: about as much as all weights once
    return np.stack(np.broadcast_arrays(forward * 1e9, backward * 1e9, stored, peak))


def _outside(work: Workload, rates: DeviceRates, recompute: Recompute) -> Floats:
    """`layer_costs` without attention's inside."""
    nothing = np.zeros_like(work.core_flops)
    return layer_costs(replace(work, core_flops=nothing, core_bytes=nothing), rates, recompute)


def _inside(work: Workload, rates: DeviceRates, recompute: Recompute) -> Floats:
    """Rows forward, backward (ns), stored, peak (bytes) of attention's inside alone, without its launches."""
    flops, moved = work.core_flops / rates.flops_per_second, work.core_bytes / rates.bytes_per_second
    forward, again = flops + moved, 0.0 if recompute is Recompute.NONE else flops + moved
    backward = rates.backward_products * flops + rates.backward_traffic * moved + again
    stored = work.core_bytes if recompute is Recompute.NONE else np.zeros_like(work.core_bytes)
    peak = np.maximum(rates.peaks.of(recompute) * rates.peaks.core(recompute) * work.core_bytes, stored)
    return np.stack(np.broadcast_arrays(forward * 1e9, backward * 1e9, stored, peak))


def peak_basis(work: Workload, peaks: PeakRatios, recompute: Recompute) -> Floats:
    """A forward's high-water mark is a multiple of these bytes; with full recomputation only one network's live."""
    divided = work.ffn_bytes if recompute is Recompute.FULL else work.split_bytes
    return divided + _PEAK_SHARED * work.shared_bytes + peaks.core(recompute) * work.core_bytes


def _time(work: Workload, rates: DeviceRates, *, backward: bool = False) -> Floats:
    """Seconds of a forward, or of a backward without recomputation."""
    products, traffic, overhead = 1.0, 1.0, 1.0
    linear = work.linear_flops
    norms = _NORM_PASSES * work.norm_bytes
    added = _ADDED_PASSES * work.added_bytes
    if backward:  # which has no gradients of frozen weights
        products, traffic, overhead = rates.backward_products, rates.backward_traffic, rates.backward_overhead
        linear = linear - work.frozen_flops / 2
        norms = 0.0
    seconds = (
        products * (rates.linear_products * linear + work.core_flops) / rates.flops_per_second
        + (traffic * (work.kept_bytes + work.core_bytes) + norms + added) / rates.bytes_per_second
        + work.message_bytes / rates.link_bytes_per_second
    )
    floor = overhead * work.kernels * rates.layer_overhead_us * 1e-6
    return np.asarray((seconds**rates.sharpness + floor**rates.sharpness) ** (1 / rates.sharpness))


def geometric(first: int, last: int, *, between: bool = False) -> IntArray:
    """first, 2·first, 4·first, … up to `last`, which is the end; with `between`, the means of neighbours too."""
    points = {first, last}
    point = first
    while point < last:
        points.add(point)
        if between and point + point // 2 < last:
            points.add(point + point // 2)
        point *= 2
    return np.array(sorted(points), np.int64)


def _counted(values: Floats) -> IntArray:
    """Whole ns or bytes, `ABSENT` where a micro-batch counts as infeasible."""
    counted = np.rint(_without_last_bits(values))
    return np.asarray(np.where(counted > _FITS_NOWHERE, ABSENT, counted), np.int64)


def _without_last_bits(values: Floats) -> Floats:
    """Round to 24 bits, so that the last bits of powers, which differ between machines, decide nothing."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(mantissa * 2.0**24), exponent - 24))
