"""Latency and bandwidth of the links between ranks, by kind: inside a node, between nodes, gathers inside a node."""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from megatron_dynapipe.core.network import GATHERS, INTER_NODE, INTRA_NODE, Link

SMALL_BYTES = 8
LARGE_BYTES = 16_000_000
REPEATS = 7


def measure_links(device: torch.device) -> dict[str, Link]:
    """Pass messages from rank 0 to the nearest rank of each kind and back, then gather between the ranks of its node;
    all ranks call it, rank 0 gets the result.

    Half a round trip is one message. Kinds that this group of ranks does not have are left out.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    inside = min(per_node, world)
    peers = {
        INTRA_NODE: 1 if inside > 1 else None,
        INTER_NODE: per_node if world > per_node else None,
    }
    links = {}
    for kind, peer in peers.items():
        if peer is not None and rank in (0, peer):
            half_trip_s = partial(_half_trip_s, rank, peer, device)
            links[kind] = _link(half_trip_s, LARGE_BYTES)
        dist.barrier()
    if inside > 1:
        group = dist.new_group(list(range(inside)))
        if isinstance(group, dist.ProcessGroup):  # which this rank is in
            most = LARGE_BYTES
            if device.type == "cpu":  # all of them copy in the same memory
                most //= inside
            gather_s = partial(_gather_s, group, device)
            links[GATHERS] = _link(gather_s, most, steps=inside - 1)
            dist.destroy_process_group(group)
        dist.barrier()
    return links if rank == 0 else {}


def sum_own_part(every: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rank's own part, along the first dimension, of the sum of all ranks' tensors: a reduce-scatter."""
    if dist.get_backend(group) == "gloo":  # which has none
        dist.all_reduce(every, group=group)
        parts = every.chunk(group.size())
        return parts[dist.get_rank(group)]
    own = every.new_empty(len(every) // group.size(), *every.shape[1:])
    dist.reduce_scatter_tensor(own, every, group=group)
    return own


def _link(seconds: Callable[[int], float], large_bytes: int, *, steps: int = 1) -> Link:
    """Of what takes its latency once, and so many times its bytes over the rate."""
    small, large = seconds(SMALL_BYTES), seconds(large_bytes)
    gbps = steps * large_bytes * 8 / max(large - small, 1e-9) / 1e9
    return Link(latency_us=round(small * 1e6, 3), gbps=round(gbps, 3))


def _half_trip_s(rank: int, peer: int, device: torch.device, size: int) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    other = peer if rank == 0 else 0
    there = partial(dist.send, message, other)
    back = partial(dist.recv, message, other)
    acts: list[Callable[[], object]] = [there, back] if rank == 0 else [back, there]
    return _median_s(acts, device) / 2


def _gather_s(group: dist.ProcessGroup, device: torch.device, size: int) -> float:
    """One of what attention of a team does in a layer (`ways.teams_rule`): gather twice, sum gradients up once."""
    own = torch.zeros(size // 4, device=device)
    every = own.new_zeros(group.size() * len(own))
    gather = partial(dist.all_gather_into_tensor, every, own, group=group)
    sum_up = partial(sum_own_part, every, group)
    return _median_s([gather, gather, sum_up], device) / 3


def _median_s(acts: list[Callable[[], object]], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS + 1):  # the first one connects
        started = time.perf_counter()
        for act in acts:
            act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
