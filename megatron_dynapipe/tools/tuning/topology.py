"""A cluster as `orchestrate` sees it: nodes of devices, where a stage may be placed, what crosses which link.

    node 0   ▣▣▣▣ │ one link to the network     A stage takes some free devices of every node; which of a node's does
    node 1   ▣▣▢▢ │ for all devices of a node   not matter. Its replicas are counted in the order of the devices.

Samples of a unit lie in equal slices on a stage's replicas, in order, so a boundary moves what the slices on either
side share:

    stage s      │  device 0   │  device 1  │
    stage s + 1  │ device 2 │ device 3 │ device 4 │
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import Network

MOST_DEVICES = 64
_MOST_PLACEMENTS = 300
_BITS = 8
_NOTHING = 1e-9
"""Shares of a unit below it are rounding."""

type Counts = tuple[int, ...]
"""Devices on each node: free ones, or a stage's."""
type _Placing = Callable[[Counts, Counts], Iterator[Counts]]
"""The devices that a stage may take, by the nodes and their free devices."""


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Devices in nodes; the last node may be smaller.

    Attributes:
        devices: the number on all nodes, at most 64.
        network: rates and latencies. A node's devices share one link to other nodes; inside a node each has its own.
        memory_bytes: memory of a device; None: not looked at.
    """

    devices: int
    network: Network = Network()
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise ConfigError(f"expected 1 to {MOST_DEVICES} devices, got {self.devices}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"expected a device's memory above 0, got {self.memory_bytes}")

    @property
    def nodes(self) -> Counts:
        """Devices of every node."""
        per_node = self.network.devices_per_node
        return tuple(min(per_node, self.devices - first) for first in range(0, self.devices, per_node))

    @cached_property
    def placements(self) -> "Placements":
        """Where stages may be placed."""
        for choices in (_all_choices, _few_choices, _next_choices):
            reached = Placements.reach(self.nodes, choices)
            if reached is not None:
                return reached
        raise AssertionError("the next devices in order are always few")

    def transfer(self, source: Counts, target: Counts) -> tuple[float, float]:
        """Latency in ns, and ns per byte of a unit, from one stage to the next (and of gradients back)."""
        a = np.array(source, np.float64)
        b = np.array(target, np.float64)
        shared = _shared(a / a.sum(), b / b.sum())
        # Between nodes each way, what leaves and what enters; inside a node over its devices' own links.
        outside = max(float((a / a.sum() - shared).max()), float((b / b.sum() - shared).max()))
        inside = float((shared / np.maximum(1, np.minimum(a, b))).max())
        network = self.network
        latency_us = network.inter_node_latency_us if outside > _NOTHING else network.intra_node_latency_us
        outside_ns = outside * _BITS / network.inter_node_gbps
        inside_ns = inside * _BITS / network.intra_node_gbps
        return latency_us * 1e3, max(outside_ns if outside > _NOTHING else 0.0, inside_ns)

    def reduction(self, stage: Counts) -> tuple[float, float]:
        """Latency in ns, and ns per byte of parameters, of an all-reduce: a ring in every node, one between nodes."""
        inside = max(stage)
        nodes = sum(count > 0 for count in stage)
        network = self.network
        latency_us = 2 * (inside - 1) * network.intra_node_latency_us + 2 * (nodes - 1) * network.inter_node_latency_us
        rate = 2 * (inside - 1) / inside * _BITS / network.intra_node_gbps
        return latency_us * 1e3, rate + 2 * (nodes - 1) / nodes * _BITS / network.inter_node_gbps

    @cached_property
    def transfers(self) -> npt.NDArray[np.float64]:
        """`transfer` between all placements: float64[2, placements, placements]."""
        counts = self.placements.counts
        values = np.zeros((2, len(counts), len(counts)))
        for (i, source), (j, target) in itertools.product(enumerate(counts), repeat=2):
            if all(a + b <= n for a, b, n in zip(source, target, self.nodes, strict=True)):
                values[:, i, j] = self.transfer(source, target)
        return values

    @cached_property
    def reductions(self) -> npt.NDArray[np.float64]:
        """`reduction` of all placements: float64[2, placements]."""
        return np.array([self.reduction(counts) for counts in self.placements.counts], np.float64).T.copy()

    def devices_of(self, stages: list[Counts]) -> list[tuple[int, ...]]:
        """Numbers of every stage's devices, each node's next ones."""
        firsts = [node * self.network.devices_per_node for node in range(len(self.nodes))]
        taken = []
        for counts in stages:
            taken.append(tuple(first + i for first, count in zip(firsts, counts, strict=True) for i in range(count)))
            firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
        return taken


class Placements(msgspec.Struct, frozen=True, kw_only=True):
    """The order in which stages may be placed: states are the free devices, state 0 the whole cluster.

    Attributes:
        free: devices left in every state.
        choices: every state's, each (placement, state after it).
    """

    counts: tuple[Counts, ...]
    free: tuple[int, ...]
    choices: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def reach(cls, nodes: Counts, choices_of: _Placing) -> "Placements | None":
        """All that can be reached from the whole cluster; None where that is too much."""
        states = {nodes: 0}
        placements = dict[Counts, int]()
        most = MOST_DEVICES**2 if choices_of is _next_choices else _MOST_PLACEMENTS
        reached = [nodes]
        choices = []
        for free in reached:
            options = []
            for counts in choices_of(nodes, free):
                after = tuple(a - b for a, b in zip(free, counts, strict=True))
                if after not in states:
                    states[after] = len(states)
                    reached.append(after)
                options.append((placements.setdefault(counts, len(placements)), states[after]))
                if max(len(placements), len(states)) > most:
                    return None
            choices.append(tuple(options))
        return cls(counts=tuple(placements), free=tuple(map(sum, reached)), choices=tuple(choices))


def _all_choices(nodes: Counts, free: Counts) -> Iterator[Counts]:
    """Every number of devices of every node; of nodes of one size that nothing uses the earlier ones give more."""

    def extend(counts: Counts) -> Iterator[Counts]:
        at = len(counts)
        if at == len(free):
            if any(counts):
                yield counts
            return
        alike = [counts[i] for i in range(at) if free[i] == nodes[i] == nodes[at] == free[at]]
        for count in range(min([free[at], *alike[-1:]]) + 1):
            yield from extend((*counts, count))

    yield from extend(())


def _few_choices(nodes: Counts, free: Counts) -> Iterator[Counts]:
    """The next devices in order, unused nodes' first, or one of every node in turn."""
    seen = set()
    unused = sorted(range(len(nodes)), key=lambda node: free[node] != nodes[node])
    for need in range(1, sum(free) + 1):
        for counts in (_take(free, range(len(nodes)), need), _take(free, unused, need), _scatter(free, need)):
            if counts not in seen:
                seen.add(counts)
                yield counts


def _next_choices(nodes: Counts, free: Counts) -> Iterator[Counts]:
    """The next devices in order."""
    yield from (_take(free, range(len(nodes)), need) for need in range(1, sum(free) + 1))


def _take(free: Counts, order: "range | list[int]", need: int) -> Counts:
    counts = [0] * len(free)
    for node in order:
        counts[node] = min(free[node], need)
        need -= counts[node]
    return tuple(counts)


def _scatter(free: Counts, need: int) -> Counts:
    counts = [0] * len(free)
    while need:
        for node, left in enumerate(free):
            if need and counts[node] < left:
                counts[node] += 1
                need -= 1
    return tuple(counts)


def _shared(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The share of a unit that both stages hold on each node."""
    a_end = np.cumsum(a)
    b_end = np.cumsum(b)
    return np.asarray(np.maximum(0.0, np.minimum(a_end, b_end) - np.maximum(a_end - a, b_end - b)))
