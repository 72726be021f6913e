"""The time that it takes to hand a micro-batch from one pipeline stage to the next."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import Floats, IntArray
from megatron_dynapipe.core.network import Network, ScatterGather


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured kind of link between ranks: a message takes its latency and its size over the bandwidth."""

    latency_us: Annotated[float, msgspec.Meta(ge=0, le=2**31 - 1)]
    gbps: Annotated[float, msgspec.Meta(gt=0)]


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
            message_bytes: of all its tensors together, whole.
        """
        if len(self.sharded) == 1:
            return self.sharded[0]
        routes_ns = np.rint(self.latency_ns[:, boundary] + message_bytes * 8 / self.gbps[:, boundary])
        return self.sharded[int(routes_ns.argmin())]


def links_between(
    network: Network,
    *,
    virtual_stages: int,
    stages: int,
    ranks_per_stage: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    scatter_gather: ScatterGather = ScatterGather.OFF,
) -> Links:
    """The boundaries between virtual stages, every device having a link of its own.

    A message takes latency + bytes / rate. Under sequence parallelism a rank's message is a shard of the whole.
    A sharded message takes latency + shard / rate, and an all-gather around the ring of its tensor-parallel ranks:
    (ranks - 1) × (latency + shard / rate) of the links between those.
    """
    node = np.arange(virtual_stages) % stages * ranks_per_stage // network.devices_per_node
    latency_ns, gbps = _link(network, node[:-1] == node[1:])
    if tensor_parallel == 1 or sequence_parallel:
        return Links(latency_ns=latency_ns[None], gbps=gbps[None] * tensor_parallel, sharded=(False,))
    ring_latency_ns, ring_gbps = _link(
        network, np.full_like(latency_ns, network.devices_per_node % tensor_parallel == 0)
    )
    steps = tensor_parallel - 1
    routes = {
        False: (latency_ns, gbps),
        True: (latency_ns + steps * ring_latency_ns, tensor_parallel / (1 / gbps + steps / ring_gbps)),
    }
    choices = {ScatterGather.OFF: (False,), ScatterGather.ON: (True,), ScatterGather.AUTO: (False, True)}
    sharded = choices[scatter_gather]
    return Links(
        latency_ns=np.stack([routes[route][0] for route in sharded]),
        gbps=np.stack([routes[route][1] for route in sharded]),
        sharded=sharded,
    )


def _link(network: Network, same_node: npt.NDArray[np.generic]) -> tuple[Floats, Floats]:
    """Latency in ns and rate in Gbit/s of links inside a node (true) or between nodes."""
    latency_us = np.where(same_node, network.intra_node_latency_us, network.inter_node_latency_us)
    return latency_us * 1e3, np.where(same_node, network.intra_node_gbps, network.inter_node_gbps)
