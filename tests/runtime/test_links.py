"""Measured links between ranks, and the sum that attention's gathers end with."""

import torch
import torch.distributed as dist

from megatron_dynapipe.runtime.links import measure_links, sum_own_part
from tests.helpers.processes import run_ranks


def measured(rank: int, world_size: int) -> tuple[dict[str, tuple[float, float]], list[float]]:
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    links = measure_links(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    every = torch.arange(2.0 * world_size) + rank
    own = sum_own_part(every, group).tolist()
    dist.destroy_process_group()
    return {kind: (link.latency_us, link.gbps) for kind, link in links.items()}, own


def test_ranks_of_two_nodes_measure_messages_and_gathers() -> None:
    ranks = run_ranks(measured, 4, environment={"LOCAL_WORLD_SIZE": "2"})
    links = ranks[0][0]
    assert set(links) == {"intra-node", "inter-node", "gathers"}
    assert all(latency_us > 0 and gbps > 0 for latency_us, gbps in links.values())
    assert [found for found, _ in ranks[1:]] == [{}] * 3, "rank 0 knows them"
    assert [own for _, own in ranks] == [[4 * first + 6, 4 * first + 10] for first in (0, 2, 4, 6)]
