"""Profiles of operator graphs as text, of the form that PipeDream writes and DAPPLE publishes, as chains of layers.

    node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
    node2 -- LSTM -- forward_compute_time=4.6, backward_compute_time=8.6, activation_size=[9e6; 3e5], parameter_size=5e7
        node1 -- node2

Times are milliseconds, sizes bytes, of one micro-batch. Nodes are put in an order in which edges point forward, those
of the file where it is one. A value crosses every place between its node and the last one that reads it. Nodes whose
name begins with `Input` are the data itself: they cost nothing, and every stage reads its own.
"""

import heapq
import re
from pathlib import Path

import msgspec

from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.tuning.layer_profile import Layer, LayerProfile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"(?P<id>\S+) -- (?P<name>.*?) -- (?P<fields>\w+=.*?)(?: -- stage_id=\d+)?\s*")
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)\s*")
_FORM = "see the docstring of megatron_dynapipe.tuning.graph_profile for the form"


class _Node(msgspec.Struct, frozen=True):
    name: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float


def read_graph_profile(path: Path, batch_size: int) -> LayerProfile:
    """A profile file as a chain.

    Args:
        path: of the text file.
        batch_size: samples of the micro-batch that was measured; the file does not say.

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
        if missing := [each for each in edge_of if each not in nodes]:
            raise CostModelError(f"{name}: expected edges between nodes of the file, got one of {missing[0]}")
    data = {each for each, node in nodes.items() if node.name.startswith("Input")}
    kept = [edge for edge in edges if not data & set(edge)]
    order = _order([each for each in nodes if each not in data], kept, name)
    place = {each: position for position, each in enumerate(order)}
    read_until = dict(place)
    for source, target in kept:
        read_until[source] = max(read_until[source], place[target])
    layers = []
    for position, each in enumerate(order):
        crossing = sum(nodes[other].activation_bytes for other in order[: position + 1] if read_until[other] > position)
        node_of = nodes[each]
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
    given = dict(part.split("=", 1) for part in fields.split(", ") if "=" in part)
    try:
        return tuple(sum(float(word) for word in given[field].strip("[] ").split(";")) for field in _FIELDS)
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
