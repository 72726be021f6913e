"""Costs computed from a model's shape and a device's rates, for machines on which nothing has been measured."""

import hashlib
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.tables import IntArray, LayerState, LayerTables, Row
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import ModelFamily, Recompute

_Floats = npt.NDArray[np.float64]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]

_BACKWARD_OVER_FORWARD = 2
"""A backward multiplies by the weights for the input's gradient and by the input for the weights'."""

_LINEAR_STORED = 34
_PEAK_OVER_STORED = 1.25


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a transformer that decide its costs. `vocabulary` is padded as it is in memory."""

    family: ModelFamily
    hidden: _AtLeastOne
    heads: _AtLeastOne
    kv_channels: _AtLeastOne
    ffn: _AtLeastOne
    vocabulary: _AtLeastOne


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device sustains.

    Attributes:
        flops_per_second: matrix products, as sustained in training (not the peak on its data sheet).
        bytes_per_second: memory traffic.
        layer_overhead_us: time of one layer's forward that no size of micro-batch goes below.
        element_bytes: bytes of a parameter or activation (2 for half precision, 4 for fp32).
    """

    flops_per_second: _Positive
    bytes_per_second: _Positive
    layer_overhead_us: Annotated[float, msgspec.Meta(ge=0)] = 20.0
    element_bytes: _AtLeastOne = 2


CPU_RATES = DeviceRates(flops_per_second=4e10, bytes_per_second=1e10, layer_overhead_us=200.0, element_bytes=4)
"""One core of a common server CPU in fp32."""

A100_RATES = DeviceRates(flops_per_second=1.5e14, bytes_per_second=1.2e12)
"""An A100 in half precision."""


class AnalyticCostModel:
    """Floating-point operations and bytes of each layer at the device's rates, tabulated on a grid.

    Between grid points costs are interpolated like measured ones; attention's quadratic part comes out slightly high.

    Args:
        shape: the model.
        rates: the device.
        max_size: most samples in one micro-batch.
        max_length: longest padded input or target.

    Raises:
        CostModelError: `max_size` or `max_length` is below 1 or 8.
    """

    def __init__(self, shape: ModelShape, rates: DeviceRates, *, max_size: int = 4096, max_length: int = 16384) -> None:
        if max_size < 1 or max_length < 8:
            raise CostModelError(f"expected max_size ≥ 1 and max_length ≥ 8, got {max_size} and {max_length}")
        self.shape = shape
        self.rates = rates
        self.name = f"analytic {shape.family}, hidden {shape.hidden}"
        self.family = shape.family
        identity = msgspec.json.encode(["analytic/1", shape, rates, max_size, max_length])
        self.digest = hashlib.blake2b(identity, digest_size=16).hexdigest()
        self._sizes = _doubling(1, max_size)
        self._lengths = _doubling(8, max_length)

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> LayerTables:
        """See `CostModel.tables`."""
        if tensor_parallel < 1 or self.shape.heads % tensor_parallel:
            raise CostModelError(
                f"tensor parallelism must divide the {self.shape.heads} attention heads, got {tensor_parallel}"
            )
        t5 = self.family is ModelFamily.T5
        targets = self._lengths if t5 else np.zeros(1, np.int64)
        b = self._sizes[:, None, None].astype(float)
        s = self._lengths[None, :, None].astype(float)
        t = targets[None, None, :].astype(float)
        layer = _Layer(self.shape, self.rates, tensor_parallel, recompute)
        values = np.zeros((len(Row), len(self._sizes), len(self._lengths), len(targets)))
        values[Row.ENCODER_FORWARD : Row.ENCODER_PEAK + 1] = layer.costs(b, s, None)
        if t5:
            values[Row.DECODER_FORWARD : Row.DECODER_PEAK + 1] = layer.costs(b, t, s)
        values[Row.HEAD_FORWARD : Row.HEAD_BACKWARD + 1] = layer.head(b, t if t5 else s)
        return LayerTables(
            sizes=self._sizes,
            inputs=self._lengths,
            targets=targets,
            values=np.rint(values).astype(np.int64),
            state=layer.state(),
        )


class _Layer:
    """One layer on one tensor-parallel rank: `b` samples of `q` positions, attending to `memory` positions if any."""

    def __init__(self, shape: ModelShape, rates: DeviceRates, tensor_parallel: int, recompute: Recompute) -> None:
        self._shape, self._rates, self._tp, self._recompute = shape, rates, tensor_parallel, recompute
        self._attention_width = shape.heads * shape.kv_channels

    def costs(self, b: _Floats, q: _Floats, memory: _Floats | None) -> _Floats:
        """Rows forward, backward, stored, peak over the broadcast shape."""
        h, a, f = self._shape.hidden, self._attention_width, self._shape.ffn
        weights = 4 * h * a + 2 * h * f
        linear = 2 * b * q * weights
        core = 4 * b * q * q * a
        keys = q
        if memory is not None:
            linear = linear + 2 * b * (q * 2 + memory * 2) * h * a
            core = core + 4 * b * q * memory * a
            keys = q + memory
            weights += 4 * h * a
        flops = (linear + core) / self._tp
        kept = b * q * (_LINEAR_STORED / 2 * h + (4 * a + 2 * f) / self._tp)
        scores = 2.5 * b * q * keys * self._shape.heads / self._tp
        forward = self._time(flops, kept + scores + weights / self._tp)
        backward = _BACKWARD_OVER_FORWARD * forward
        size = self._rates.element_bytes
        everything = (kept + scores) * size
        boundary = b * (q if memory is None else q + memory) * h * size
        if self._recompute is Recompute.FULL:
            backward, stored = backward + forward, boundary
        elif self._recompute is Recompute.SELECTIVE:
            backward, stored = backward + self._time(core / self._tp, scores), kept * size
        else:
            stored = everything
        peak = everything * _PEAK_OVER_STORED
        return np.stack(np.broadcast_arrays(forward, backward, stored, peak))

    def head(self, b: _Floats, q: _Floats) -> _Floats:
        """Rows forward, backward of the output projection and the loss."""
        logits = b * q * self._shape.vocabulary / self._tp
        flops = 2 * logits * self._shape.hidden
        forward = self._time(flops, 3 * logits)
        return np.stack(np.broadcast_arrays(forward, _BACKWARD_OVER_FORWARD * forward))

    def state(self) -> LayerState:
        """Parameter bytes, counted as 2 bytes each, as the files do."""
        h, a, f = self._shape.hidden, self._attention_width, self._shape.ffn
        encoder = (4 * h * a + 2 * h * f) // self._tp
        decoder = (8 * h * a + 2 * h * f) // self._tp
        return LayerState(
            embedding_bytes=2 * self._shape.vocabulary * h // self._tp,
            encoder_bytes=2 * encoder,
            decoder_bytes=2 * decoder if self._shape.family is ModelFamily.T5 else 0,
        )

    def _time(self, flops: _Floats, elements: _Floats) -> _Floats:
        """Nanoseconds: products, then memory traffic, then what no layer goes below."""
        seconds = flops / self._rates.flops_per_second
        seconds = seconds + elements * self._rates.element_bytes / self._rates.bytes_per_second
        return np.asarray(seconds * 1e9 + self._rates.layer_overhead_us * 1e3)


def _doubling(first: int, last: int) -> IntArray:
    """first, 2·first, 4·first, … up to `last`, which is the end."""
    points = [first]
    while points[-1] * 2 < last:
        points.append(points[-1] * 2)
    return np.array(sorted({*points, last}), np.int64)
