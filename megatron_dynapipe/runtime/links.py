"""Latency and bandwidth of the links between ranks, by kind: inside a node, between nodes."""

import os
import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megatron_dynapipe.core.network import INTER_NODE, INTRA_NODE, Link

SMALL_BYTES = 8
LARGE_BYTES = 16_000_000
REPEATS = 7


def measure_links(device: torch.device) -> dict[str, Link]:
    """Pass messages from rank 0 to the nearest rank of each kind and back; all ranks call it, rank 0 gets the result.

    Half a round trip is one message. Kinds that this group of ranks does not have are left out.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    peers = {
        INTRA_NODE: 1 if min(per_node, world) > 1 else None,
        INTER_NODE: per_node if world > per_node else None,
    }
    links = {}
    for kind, peer in peers.items():
        if peer is not None and rank in (0, peer):
            small, large = (_half_trip_s(rank, peer, size, device) for size in (SMALL_BYTES, LARGE_BYTES))
            gbps = LARGE_BYTES * 8 / max(large - small, 1e-9) / 1e9
            links[kind] = Link(latency_us=round(small * 1e6, 3), gbps=round(gbps, 3))
        dist.barrier()
    return links if rank == 0 else {}


def _half_trip_s(rank: int, peer: int, size: int, device: torch.device) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    other = peer if rank == 0 else 0
    there = partial(dist.send, message, other)
    back = partial(dist.recv, message, other)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one connects
        started = time.perf_counter()
        for act in (there, back) if rank == 0 else (back, there):
            act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:]) / 2
