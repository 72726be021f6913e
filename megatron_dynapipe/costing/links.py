"""The time that it takes to hand a micro-batch from one pipeline stage to the next."""

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.core.network import Links, Network, ScatterGather


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
