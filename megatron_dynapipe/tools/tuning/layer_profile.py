"""The costs of the layers of a chain, as `orchestrate` reads it: from measured segments, or from a profiled graph.

    layer 0 │ layer 1 │ layer 2        time of a slice of n samples, forward and backward
           ▲         ▲                 bytes of a sample that cross here

Graphs of operators are text, of the form that PipeDream writes and DAPPLE publishes:

    node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
    node2 -- LSTM -- forward_compute_time=4.6, backward_compute_time=8.6, activation_size=[9e6; 3e5], parameter_size=5e7
        node1 -- node2

Times are milliseconds, sizes bytes, of one micro-batch. Nodes are put in an order in which edges point forward, that
of the file where it is one. A value crosses every place between its node and the last one that reads it. Nodes whose
name begins with `Input` are the data itself: they cost nothing, and every stage reads its own.
"""

import heapq
import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.cost.tables import IntArray
from megatron_dynapipe.errors import ConfigError, CostModelError
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS

_STATE_PER_PARAMETER_BYTE = 4
"""Parameter, gradient and Adam's two moments, all in the parameter's type."""
_PARAMETER_BYTES = 4

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"(?P<id>\S+) -- (?P<name>.*?) -- (?P<fields>\w+=.*?)(?: -- stage_id=\d+)?\s*")
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)\s*")
_FORM = "see the docstring of megatron_dynapipe.tools.tuning.layer_profile for the form"


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer.

    Attributes:
        forward_ms, backward_ms: of a slice of each of the profile's sizes.
        boundary_bytes: of a sample, that cross to the next layer; what skips this layer is among it.
        stored_bytes: of a sample, kept from its forward's end to its backward's.
        parameter_bytes: of all its parameters.
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


class _Node(msgspec.Struct, frozen=True):
    name: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float


def read_graph_profile(path: Path, batch_size: int) -> LayerProfile:
    """A profile file as a chain; it does not say how many samples the measured micro-batch had.

    Raises:
        CostModelError: it is missing, or a line is not of the form, names a node that is not there, or closes a cycle.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CostModelError(f"cannot read the profile {path}: {error}") from error
    return parse_graph_profile(text, batch_size, name=path.name)


def parse_graph_profile(text: str, batch_size: int, name: str = "profile") -> LayerProfile:
    """`read_graph_profile` of a file's text."""
    if batch_size < 1:
        raise CostModelError(f"expected a profiled micro-batch of at least 1 sample, got {batch_size}")
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if edge := _EDGE.fullmatch(line):
            edges.append((edge["source"], edge["target"]))
        elif node := _NODE.fullmatch(line):
            nodes[node["id"]] = _Node(node["name"], *_numbers(node["fields"], f"{name}, line {number}"))
        elif line.strip():
            raise CostModelError(f"{name}, line {number}: expected a node or an edge, got {line!r}", hint=_FORM)
    for edge_of in edges:
        if missing := [node_id for node_id in edge_of if node_id not in nodes]:
            raise CostModelError(f"{name}: expected edges between nodes of the file, got one of {missing[0]}")
    data = {node_id for node_id, node in nodes.items() if node.name.startswith("Input")}
    kept = [edge for edge in edges if not data & set(edge)]
    order = _order([node_id for node_id in nodes if node_id not in data], kept, name)
    place = {node_id: position for position, node_id in enumerate(order)}
    read_until = dict(place)
    for source, target in kept:
        read_until[source] = max(read_until[source], place[target])
    layers = []
    for position, node_id in enumerate(order):
        crossing = sum(nodes[other].activation_bytes for other in order[: position + 1] if read_until[other] > position)
        node_of = nodes[node_id]
        layers.append(
            Layer(
                name=node_of.name,
                forward_ms=(node_of.forward_ms,),
                backward_ms=(node_of.backward_ms,),
                boundary_bytes=crossing / batch_size,
                stored_bytes=node_of.activation_bytes / batch_size,
                parameter_bytes=node_of.parameter_bytes,
            )
        )
    return LayerProfile(name=name, sizes=(batch_size,), layers=tuple(layers))


def _numbers(fields: str, where: str) -> tuple[float, ...]:
    values = dict(part.split("=", 1) for part in fields.split(", ") if "=" in part)
    try:
        return tuple(sum(float(word) for word in values[field].strip("[] ").split(";")) for field in _FIELDS)
    except (KeyError, ValueError) as error:
        raise CostModelError(f"{where}: expected numbers {', '.join(_FIELDS)}, got {fields!r}", hint=_FORM) from error


def _order(nodes: list[str], edges: list[tuple[str, str]], name: str) -> list[str]:
    """Nodes with edges pointing forward; of those that may come next, the first in the file."""
    rank = {node: position for position, node in enumerate(nodes)}
    waits, readers = dict.fromkeys(nodes, 0), {node: list[str]() for node in nodes}
    for source, target in edges:
        waits[target] += 1
        readers[source].append(target)
    ready = [rank[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, rank[reader])
    if len(order) < len(nodes):
        stuck = next(node for node in nodes if waits[node])
        raise CostModelError(f"{name}: expected a graph without cycles, got one through {stuck}")
    return order
