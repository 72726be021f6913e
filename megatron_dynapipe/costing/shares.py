"""The costs of a replica's share of a sample that a team runs together (`ways.teams_rule`).

    a sample of 2 · c · m positions, in a team of c        a share of 2 · m positions: two chunks, 2 · c − 1 before both

To a layer a share costs what a sample of as many positions does, and in addition what attending to the chunks before
its two costs, which are as many at every place: as for a piece of 2 · m positions after (c − 1) · m earlier ones.
Attention also gathers the keys and values of all members over the link inside a node: in its forward pass, again in its
backward one and where it is recomputed; and gradients of all of them are summed up once.
"""

import numpy as np

from megatron_dynapipe.core.costs import ATTENTION, LARGEST_COST, CostTables, IntArray, Quantity
from megatron_dynapipe.core.network import Network
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing.pieces import piece_costs

BITS = 8
"""Of a byte: rates of links are in Gbit/s, which is bits a nanosecond."""


def share_costs(
    tables: CostTables,
    recompute: Recompute,
    *,
    chunk: IntArray,
    ranks: int | IntArray,
    element_bytes: int,
    network: Network,
) -> IntArray:
    """The further costs of shares to modules by kind: int64[shares, kinds, len(Quantity)], ns and bytes.

    Args:
        tables: modules' costs.
        recompute: the mode that they are of.
        chunk: positions of each share's chunks.
        ranks: members of each share's team.
        element_bytes: of an element of keys and values.
        network: the link that members gather over is inside a node.
    """
    own = 2 * chunk
    costs = piece_costs(
        tables,
        recompute,
        positions=own,
        before=(ranks - 1) * chunk,
        later=np.zeros_like(chunk),
        element_bytes=element_bytes,
    )
    its = costs[:, tables.kinds.index(ATTENTION)]
    of_member = 2 * tables.key_value_channels * own * element_bytes  # keys and values
    once_ns = (ranks - 1) * of_member * BITS / network.intra_node_gbps + 2_000 * (
        of_member > 0
    ) * network.intra_node_latency_us
    again = 3 if recompute is not Recompute.NONE else 2  # the gathers of a backward pass, and its reduce-scatter
    its[:, Quantity.FORWARD] += np.rint(once_ns).astype(np.int64)
    its[:, Quantity.BACKWARD] += np.rint(again * once_ns).astype(np.int64)
    # Joined keys and values, which are a chunk more than the sample's; their gradients; and, of one, all members'.
    its[:, Quantity.PEAK] += 2 * (of_member * ranks + of_member // 2) + of_member * ranks // 2
    return np.clip(costs, -LARGEST_COST, LARGEST_COST)
