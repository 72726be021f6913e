"""The links between devices of a cluster, as settings name them; `cost.links` says what messages take over them."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dynapipe.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dynapipe.cost.links import Link

INTRA_NODE = "intra-node"
INTER_NODE = "inter-node"
"""Kinds of links between ranks, as files name them."""


class ScatterGather(enum.StrEnum):
    """Whether the tensor-parallel ranks of a stage, which hold equal outputs, each send a shard of a message, which
    the receiving ranks all-gather."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"
    """Each message takes the faster route over its boundary's link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between devices: one kind inside a node, one between nodes.

    Ranks are counted as Megatron places them: tensor parallel first, then data parallel, then pipeline; so stages lie
    on nodes in order, `devices_per_node / (data parallel × tensor parallel)` to a node.
    """

    devices_per_node: int = 8
    intra_node_gbps: float = 4800.0
    inter_node_gbps: float = 100.0
    intra_node_latency_us: float = 0.0
    inter_node_latency_us: float = 4000.0

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "intra_node_gbps", "inter_node_gbps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("intra_node_latency_us", "inter_node_latency_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    @classmethod
    def over(cls, measured: Mapping[str, "Link"], *, devices_per_node: int, **chosen: float | None) -> "Network":
        """Every rate and latency that is given; else the one that a cost model file has measured; else the default."""
        numbers: dict[str, float] = {}
        for name, kind in (("intra_node", INTRA_NODE), ("inter_node", INTER_NODE)):
            if (link := measured.get(kind)) is not None:
                numbers |= {f"{name}_gbps": link.gbps, f"{name}_latency_us": link.latency_us}
        numbers |= {name: value for name, value in chosen.items() if value is not None}
        return cls(devices_per_node=devices_per_node, **numbers)
