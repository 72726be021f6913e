"""Costs computed from a model's shape and a device's rates, for machines on which nothing has been measured.

Rates of known devices: products and memory traffic are the data sheet's dense half-precision peak and bandwidth
(NVIDIA), times the shares of them that `A100_RATES` is of an A100's: 0.7 of 312 TFLOP/s and 0.52 of 1,555 GB/s.
Links carry two thirds of the data sheet's figure: all-reduces between A100s reach 200 of 300 GB/s (nccl-tests #149).
Overheads are those of launching a layer's kernels, which depends on the host more than on the device: no figures of
newer hosts are published, and a run measures its own (`--dynapipe-calibrate`).
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from megatron_dynapipe.cost.division import Division, Kind, Rates, division_by_flops
from megatron_dynapipe.cost.format import Link
from megatron_dynapipe.cost.halves import with_parts
from megatron_dynapipe.cost.shape import ModelShape
from megatron_dynapipe.cost.tables import ABSENT, EndState, IntArray, LayerState, LayerTables, PackedTables, Row
from megatron_dynapipe.cost.work import Floats, LayerWork, Workload
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import ModelFamily, Recompute

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NonNegative = Annotated[float, msgspec.Meta(ge=0)]

_PEAK_CORE = {Recompute.NONE: 0.42, Recompute.SELECTIVE: 0.03, Recompute.FULL: 0.03}
_PEAK_SHARED = 0.4
"""How much attention's inside, and what all tensor-parallel ranks hold, count in a forward's high-water mark against
what they divide: as in published profiles of Megatron's layers."""


_GRADIENT_BYTES = 4
"""Of a parameter, as Megatron adds gradients up."""

_FITS_NOWHERE = 2**36
"""A layer's time (ns) or memory (bytes) from which a micro-batch counts as infeasible: over a minute, or more than
devices hold. Sums over a stage's layers so stay inside what the planner's core computes with."""


class PeakRatios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """High-water mark of a layer over what its forward works on (`peak_basis`), under each recompute mode."""

    none: _Positive = 1.25
    selective: _Positive = 1.25
    full: _Positive = 1.25

    def of(self, recompute: Recompute) -> float:
        """The ratio of one mode."""
        ratio: float = getattr(self, recompute.value)
        return ratio


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device sustains.

    A pass takes its products, its memory traffic and its messages one after another, but never less than its kernels
    take to launch; `sharpness` says how suddenly the one takes over from the other.

    Attributes:
        flops_per_second: matrix products, as sustained in training (not the peak on its data sheet).
        bytes_per_second: memory traffic.
        layer_overhead_us: time of one layer's forward that no size of micro-batch goes below.
        element_bytes: bytes of a parameter or activation (2 for half precision, 4 for fp32).
        link_bytes_per_second: messages between tensor-parallel ranks.
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
    backward_products: _Positive = 2.0
    backward_traffic: _Positive = 2.0
    backward_overhead: _Positive = 1.0
    sharpness: Annotated[float, msgspec.Meta(ge=1)] = 4.0
    peaks: PeakRatios = PeakRatios()


CPU_RATES = DeviceRates(flops_per_second=4e10, bytes_per_second=1e10, layer_overhead_us=200.0, element_bytes=4)
"""One core of a common server CPU in fp32."""

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
        max_length: longest padded input or target.
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
        self.hidden_size: int | None = shape.hidden
        self.links: dict[str, Link] = {}
        numbers = {name: getattr(shape, name) for name in ("hidden", "heads", "kv_channels", "ffn")}
        self.model = {name: msgspec.Raw(msgspec.json.encode(number)) for name, number in numbers.items()}
        self._sequence_parallel = sequence_parallel
        identity = msgspec.json.encode(["analytic/6", shape, rates, max_size, max_length, sequence_parallel])
        self.digest = hashlib.blake2b(identity, digest_size=16).hexdigest()
        self._sizes = geometric(1, max_size)
        self._lengths = geometric(8, max_length, between=True)

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> LayerTables:
        """See `CostModel.tables`."""
        layer = self.layer_work(tensor_parallel)
        t5 = self.family is ModelFamily.T5
        targets = self._lengths if t5 else np.zeros(1, np.int64)
        b = self._sizes[:, None, None].astype(float)
        s = self._lengths[None, :, None].astype(float)
        t = targets[None, None, :].astype(float)
        values = self._values(layer, b, s, t, partial(layer_costs, rates=self.rates, recompute=recompute))
        values[:, (values > _FITS_NOWHERE).any(axis=0)] = ABSENT
        tables = LayerTables(
            packed=self._packed(layer, recompute),
            sizes=self._sizes,
            inputs=self._lengths,
            targets=targets,
            values=values.astype(np.int64),
            state=self._state(tensor_parallel),
            peak_covers_backward=True,
            key_value_channels=self.shape.key_value_channels // tensor_parallel,
            exchange_bytes=self._exchange_bytes(tensor_parallel),
            division=self._division(recompute),
        )
        return with_parts(tables, recompute)

    def _values(
        self,
        layer: LayerWork,
        b: Floats,
        s: Floats,
        t: Floats,
        costs: Callable[[Workload], Floats],
        *,
        ends: bool = True,
    ) -> Floats:
        """Costs of every kind of layer and, with `ends`, of the head and the encoder's output: `[len(Row), …]`."""
        values = np.zeros((len(Row), *np.broadcast_shapes(b.shape, s.shape, t.shape)))
        for first, work in self._layers(layer, b, s, t):
            values[first : first + 4] = costs(work)
        if ends:
            t5 = self.family is ModelFamily.T5
            q = t if t5 else s
            head = layer_costs(layer.head(b, q), self.rates, Recompute.NONE)[:2]
            values[Row.HEAD_FORWARD : Row.HEAD_PEAK + 1] = np.stack(
                np.broadcast_arrays(*head, *layer.head_memory(b, q))
            )
            values[Row.ENCODED_STORED] = layer.encoder(b, s).input_bytes if t5 else 0
        return np.rint(_without_last_bits(values))

    def _layers(self, layer: LayerWork, b: Floats, s: Floats, t: Floats) -> list[tuple[Row, Workload]]:
        """Every kind of layer: the first of its rows, and its work."""
        first = Row.ENCODER_FORWARD, replace(layer, shape=self.shape.dense).encoder(b, s)
        if self.family is ModelFamily.T5:
            return [first, (Row.DECODER_FORWARD, layer.decoder(b, t, s))]
        return [first, (Row.EXPERT_FORWARD, layer.encoder(b, s))] if self.shape.kinds > 1 else [first]

    def _packed(self, layer: LayerWork, recompute: Recompute) -> PackedTables:
        """Packed rows counted exactly: all work but attention's inside over the row, that over each sample."""
        t5 = self.family is ModelFamily.T5
        rows = geometric(8, int(self._lengths[-1]) * 16, between=True)
        grids = []
        for inputs, inside in ((rows, False), (self._lengths, True)):
            targets = inputs if t5 else np.zeros(1, np.int64)
            one, s, t = np.ones((1, 1)), inputs[:, None].astype(float), targets[None, :].astype(float)
            costs = partial(_inside if inside else _outside, rates=self.rates, recompute=recompute)
            values = self._values(layer, one, s, t, costs, ends=not inside)
            values[values > _FITS_NOWHERE] = ABSENT
            grids.append((inputs, targets, values.astype(np.int64)))
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

    def _division(self, recompute: Recompute) -> Mapping[Kind, Division]:
        def of(shape: ModelShape) -> dict[Kind, Division]:
            found = division_by_flops(
                shape.hidden,
                shape.query_channels,
                shape.mlp_width,
                recompute,
                key_value_channels=shape.key_value_channels,
                ffn_parameters=shape.mlp_parameters(1) // (2 * shape.hidden),
            )
            if shape.experts is None or recompute is Recompute.FULL:
                return dict(found)
            work, one = LayerWork(shape=shape, element_bytes=1), np.ones(())
            halves = (work.self_attention(one, one), work.feed_forward(one, one))
            attention, mlp = (int(half.kept_bytes) for half in halves)
            kept = Rates(attention, 0, mlp)
            return {"encoder": msgspec.structs.replace(found["encoder"], stored=(kept, kept))}

        if self.shape.kinds == 1:
            return of(self.shape)
        return {"encoder": of(self.shape.dense)["encoder"], "expert": of(self.shape)["encoder"]}

    def _state(self, tensor_parallel: int) -> LayerState:
        shape, t5 = self.shape, self.family is ModelFamily.T5
        attention, mlp = shape.attention_parameters(tensor_parallel), shape.mlp_parameters(tensor_parallel)
        dense = shape.dense.mlp_parameters(tensor_parallel)
        norm, tables = shape.norm_parameters(shape.hidden), shape.relative_buckets * shape.heads
        rows = shape.rows(tensor_parallel) // tensor_parallel
        return LayerState(
            embedding_bytes=2 * rows * shape.hidden,
            encoder_bytes=2 * (attention + dense),
            decoder_bytes=2 * ((1 + t5) * attention + mlp) if t5 or shape.kinds > 1 else 0,
            expert_bytes=2 * shape.expert_parameters(tensor_parallel),
            ends=EndState(
                tied=shape.tied,
                positions=2 * shape.positions * shape.hidden,
                encoder_tables=2 * tables,
                decoder_tables=2 * tables if t5 else 0,
                norm=2 * norm,
                head_biases=2 * rows if t5 and shape.tied else 0,
            ),
            gradient_bytes=_GRADIENT_BYTES,
        )

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
    peak = np.maximum(rates.peaks.of(recompute) * peak_basis(work, recompute), stored)
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
    peak = np.maximum(rates.peaks.of(recompute) * _PEAK_CORE[recompute] * work.core_bytes, stored)
    return np.stack(np.broadcast_arrays(forward * 1e9, backward * 1e9, stored, peak))


def peak_basis(work: Workload, recompute: Recompute) -> Floats:
    """Bytes of which a forward's high-water mark is a multiple; with full recomputation only one network's live."""
    divided = work.ffn_bytes if recompute is Recompute.FULL else work.split_bytes
    return divided + _PEAK_SHARED * work.shared_bytes + _PEAK_CORE[recompute] * work.core_bytes


def _time(work: Workload, rates: DeviceRates, *, backward: bool = False) -> Floats:
    """Seconds of a forward, or of a backward without recomputation."""
    products, traffic, overhead = 1.0, 1.0, 1.0
    if backward:
        products, traffic, overhead = rates.backward_products, rates.backward_traffic, rates.backward_overhead
    seconds = (
        products * (work.linear_flops + work.core_flops) / rates.flops_per_second
        + traffic * (work.kept_bytes + work.core_bytes) / rates.bytes_per_second
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


def _without_last_bits(values: Floats) -> Floats:
    """Round to 24 bits, so that the last bits of powers, which differ between machines, decide nothing."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(mantissa * 2.0**24), exponent - 24))


_PRODUCTS, _TRAFFIC = 0.7, 0.52

_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # part of the name, TFLOP/s, GB/s of memory, GB/s to the other devices of a node (one direction)
    ("GB200", 2500, 8000, 900),
    ("B200", 2250, 8000, 900),
    ("H200", 989, 4800, 450),
    ("GH200", 989, 4000, 450),
    ("H100 PCIe", 756, 2000, 300),
    ("H100", 989, 3350, 450),
    ("H800", 989, 3350, 200),
    ("A100-SXM4-80GB", 312, 2039, 300),
    ("A100", 312, 1555, 300),
    ("A800", 312, 2039, 200),
    ("L40S", 362, 864, 32),
    ("L40", 181, 864, 32),
    ("A10G", 70, 600, 32),
    ("A10", 125, 600, 32),
    ("V100", 125, 900, 150),
    ("RTX 4090", 165, 1008, 32),
    ("RTX 3090", 71, 936, 32),
)
"""The first row whose text is in a device's name counts."""


def rates_of(name: str) -> DeviceRates | None:
    """Rates of a device in half precision, by the name that CUDA gives it; None if it is not in the table."""
    folded = name.casefold()
    for known, tflops, memory, links in _PEAKS:
        if known.casefold() in folded:
            return msgspec.structs.replace(
                A100_RATES,
                flops_per_second=tflops * 1e12 * _PRODUCTS,
                bytes_per_second=memory * 1e9 * _TRAFFIC,
                link_bytes_per_second=links * 1e9 * 2 / 3,
            )
    return None
