"""The costs of the layers of a chain, as `orchestrate` reads it from measured segments.

layer 0 │ layer 1 │ layer 2        time of a slice of n samples, forward and backward
       ▲         ▲                 bytes of a sample that cross here
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import IntArray
from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS
from megatron_dynapipe.segments import SegmentCosts

_STATE_PER_PARAMETER_BYTE = 4
"""Parameter, gradient and Adam's two moments, all in the parameter's type."""
_PARAMETER_BYTES = 4


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        forward_ms, backward_ms: times of a slice of each of the profile's sizes.
        boundary_bytes: a sample's bytes that cross to the next layer, with what skips this layer.
        stored_bytes: a sample's bytes, kept from its forward's end to its backward's.
        parameter_bytes: bytes of all its parameters.
    """

    name: str
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    boundary_bytes: float
    stored_bytes: float
    parameter_bytes: float


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a chain of layers.

    Attributes:
        sizes: samples of the slices that were measured, rising. Between them time is linear; below the first and above
            the last it is proportional to theirs.
        layers: from input to loss.
    """

    name: str
    sizes: tuple[int, ...]
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise CostModelError(f"expected at least one layer in the profile {self.name}, got none")
        if not self.sizes or self.sizes[0] < 1 or any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise CostModelError(f"expected rising numbers of samples in the profile {self.name}, got {self.sizes}")
        for layer in self.layers:
            values = (*layer.forward_ms, *layer.backward_ms)
            values += (layer.boundary_bytes, layer.stored_bytes, layer.parameter_bytes)
            if not all(0 <= value < math.inf for value in values):
                raise CostModelError(f"expected times and sizes of at least 0 in layer {layer.name}, got {values}")
            if not len(layer.forward_ms) == len(layer.backward_ms) == len(self.sizes):
                raise CostModelError(f"expected a time for each of {len(self.sizes)} sizes in layer {layer.name}")

    @classmethod
    def of_segments(cls, costs: SegmentCosts, length: int | None = None) -> "LayerProfile":
        """The segments that `profile_module` measured, at one length of the samples, by default the largest.

        Raises:
            ConfigError: the length was not measured, or not with every size.
        """
        known = sorted(int(size) for size in costs.segments[0].boundary_mb)
        chosen = known[-1] if length is None else length
        if chosen not in known:
            raise ConfigError(f"expected a length among {known}, which were measured, got {chosen}")
        key = str(chosen)
        layers = []
        for index, segment in enumerate(costs.segments):
            largest = segment.boundary_mb[key][-1][0]
            layers.append(
                Layer(
                    name=segment.name or f"segment {index}",
                    forward_ms=tuple(value for _, value in segment.time_ms["forward"][key]),
                    backward_ms=tuple(value for _, value in segment.time_ms["backward"][key]),
                    boundary_bytes=segment.boundary_mb[key][-1][1] * BYTES_PER_MB / largest,
                    stored_bytes=segment.stored_activation_mb[key][-1][1] * BYTES_PER_MB / largest,
                    parameter_bytes=float(segment.parameters * _PARAMETER_BYTES),
                )
            )
        sizes = tuple(int(size) for size, _ in costs.segments[0].boundary_mb[key])
        return cls(name=costs.name, sizes=sizes, layers=tuple(layers))

    def times_ns(self, samples: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Forward and backward time of every layer for a slice of so many samples, in ns: two float64[layers]."""
        sizes = np.array([0, *self.sizes], np.float64)
        return _at(sizes, [layer.forward_ms for layer in self.layers], samples), _at(
            sizes, [layer.backward_ms for layer in self.layers], samples
        )

    def single_device_ms(self, micro_batch_size: int, global_batch_size: int) -> float:
        """Time of a global batch on one device, one micro-batch after another."""
        forward, backward = self.times_ns(micro_batch_size)
        return float((forward + backward).sum()) / NS_PER_MS * global_batch_size / micro_batch_size

    def before(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        """Sums of a value over the layers before each place between layers: float64[layers + 1]."""
        return np.concatenate([[0.0], np.cumsum(np.array(values, np.float64))])

    @property
    def state_bytes(self) -> IntArray:
        """Parameters with gradients and optimizer state, summed as `before`: int64[layers + 1]."""
        before_bytes = self.before([layer.parameter_bytes * _STATE_PER_PARAMETER_BYTE for layer in self.layers])
        return np.rint(before_bytes).astype(np.int64)


def _at(
    sizes: npt.NDArray[np.float64], values_ms: Sequence[tuple[float, ...]], samples: float
) -> npt.NDArray[np.float64]:
    table = np.concatenate([np.zeros((len(values_ms), 1)), np.array(values_ms, np.float64)], axis=1) * NS_PER_MS
    if samples >= sizes[-1]:
        return np.asarray(table[:, -1] * samples / sizes[-1])
    above = int(np.searchsorted(sizes, samples, side="right"))
    share = (samples - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return np.asarray(table[:, above - 1] * (1 - share) + table[:, above] * share)
