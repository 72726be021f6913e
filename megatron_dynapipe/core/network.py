"""The links between devices of a cluster, as settings name them; `costing.links` says what messages take over them."""

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from megatron_dynapipe.core.costs import Floats, IntArray
from megatron_dynapipe.core.errors import ConfigError

INTRA_NODE = "intra-node"
INTER_NODE = "inter-node"
GATHERS = "gathers"
"""Kinds of links between ranks, as files name them; the last one: gathers between the ranks of a node."""


class ScatterGather(enum.StrEnum):
    """Whether the tensor-parallel ranks of a stage, which hold equal outputs, each send a shard of a message, which
    the receiving ranks all-gather."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"
    """Each message takes the faster route over its boundary's link."""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured kind of link between ranks: a message takes its latency and its size over the bandwidth."""

    latency_us: Annotated[float, msgspec.Meta(ge=0, le=2**31 - 1)]
    gbps: Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between devices: one kind inside a node, one between nodes; gathers inside a node, where measured.

    Megatron places tensor-parallel ranks first, then data-parallel ones, then stages, which so lie on nodes in order.
    """

    devices_per_node: int = 8
    intra_node_gbps: float = 4800.0
    inter_node_gbps: float = 100.0
    intra_node_latency_us: float = 0.0
    inter_node_latency_us: float = 4000.0
    gathers: Link | None = None

    def __post_init__(self) -> None:
        for name, most in (("devices_per_node", 2**20), ("intra_node_gbps", math.inf), ("inter_node_gbps", math.inf)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} must be above 0 and at most {most}, got {getattr(self, name)}")
        for name in ("intra_node_latency_us", "inter_node_latency_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    @classmethod
    def over(cls, measured: Mapping[str, Link], *, devices_per_node: int, **chosen: float | None) -> "Network":
        """Every rate and latency that is given; else the one that a cost model file has measured; else the default."""
        numbers: dict[str, float] = {}
        for name, kind in (("intra_node", INTRA_NODE), ("inter_node", INTER_NODE)):
            if (link := measured.get(kind)) is not None:
                numbers |= {f"{name}_gbps": link.gbps, f"{name}_latency_us": link.latency_us}
        numbers |= {name: value for name, value in chosen.items() if value is not None}
        return cls(devices_per_node=devices_per_node, gathers=measured.get(GATHERS), **numbers)


class TransferRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of transfers; the defaults are gloo's.

    Attributes:
        receive_ahead: passes that may run between a receive's start and the wait for it; 0 starts it right before its
            wait, None as early as one receive at a time on a channel allows.
        ordered_starts: a send's start completes only when its channel's previous message is through, as where streams
            share one hardware queue. Plans in which stages would then wait for one another are not made.
    """

    receive_ahead: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ordered_starts: bool = False

    @property
    def are_plain(self) -> bool:
        """Whether a started transfer holds up nobody, and receives are started as early as they can be."""
        return self.receive_ahead is None and not self.ordered_starts

    def relaxed(self) -> Iterator["TransferRules"]:
        """Rules to try in turn where every order stalls by these: receives earlier and earlier, starts ordered as here.

        Interleaved orders whose groups of micro-batches are larger than the pipeline need it.
        """
        if self.receive_ahead is not None:
            for ahead in (*range(self.receive_ahead + 1, _MOST_AHEAD + 1), None):
                yield msgspec.structs.replace(self, receive_ahead=ahead)


_MOST_AHEAD = 2

GLOO_RULES = TransferRules()
"""A started transfer holds up nobody."""

CUDA_RULES = TransferRules(receive_ahead=0, ordered_starts=True)
"""GPUs with one hardware queue: no receive waits on the device while a pass runs, and starts wait for one another."""

MANY_QUEUES_RULES = TransferRules(receive_ahead=1)
"""GPUs on which every stream has a hardware queue of its own: a receive starts one pass ahead of its own."""

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_ENOUGH = 16
"""A rank has at most eight streams for channels; computing, other groups and copies have streams of their own."""


def cuda_rules(environ: Mapping[str, str]) -> TransferRules:
    """The rules of training on GPUs, by the hardware queues that the environment gives a process.

    Runs set one with tensor parallelism below Blackwell, as Megatron asserts, and else 32. If nothing is set, there
    are 8, which streams share.
    """
    queues = environ.get(_QUEUES, "")
    return MANY_QUEUES_RULES if queues.isdecimal() and int(queues) >= _ENOUGH else CUDA_RULES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """The routes by which a message can cross each boundary between virtual stages; it takes the fastest.

    Attributes:
        latency_ns, gbps: latency, and bits of the whole message per ns: float64[routes, virtual stages - 1].
        sharded: per route, whether the message is sharded over the tensor-parallel ranks.
    """

    latency_ns: Floats
    gbps: Floats
    sharded: tuple[bool, ...]

    def transfer_ns(self, message_bytes: IntArray) -> IntArray:
        """Time of messages over every boundary, either way: `[queries, virtual stages - 1]`, as the bytes given."""
        routes_ns = np.rint(self.latency_ns + message_bytes[:, None] * 8 / self.gbps)
        return np.asarray(routes_ns.min(axis=1), np.int64)

    def is_sharded(self, boundary: int, message_bytes: int) -> bool:
        """Whether a message crosses a boundary sharded; whole, where both routes take as long.

        Args:
            boundary: that of the virtual stages `boundary` and `boundary + 1`.
            message_bytes: bytes of all its tensors together, whole.
        """
        if len(self.sharded) == 1:
            return self.sharded[0]
        routes_ns = np.rint(self.latency_ns[:, boundary] + message_bytes * 8 / self.gbps[:, boundary])
        return self.sharded[int(routes_ns.argmin())]
