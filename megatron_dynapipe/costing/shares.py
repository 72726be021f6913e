"""The costs of a replica's share of a sample that a team runs together (`ways.teams_rule`).

    a sample of 2 · c · m positions, in a team of c        a share of 2 · m positions: two chunks, 2 · c − 1 before both

To a layer a share costs what a sample of as many positions does, and in addition what attending to the chunks before
its two costs, which are as many at every place: as for a piece of 2 · m positions after (c − 1) · m earlier ones.
Attention also gathers the keys and values of all members, in a ring: in its forward pass, again in its backward one and
where it is recomputed; and gradients of all of them are summed up once. A team that one node does not hold fills nodes,
and enters each by the links of all devices that it has there. A row's samples share its gathers, and their latency.
"""

from dataclasses import replace

import numpy as np

from megatron_dynapipe.core.costs import ABSENT, ATTENTION, LARGEST_COST, CostTables, IntArray, Quantity
from megatron_dynapipe.core.network import Link, Network
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
    tensor_parallel: int,
) -> IntArray:
    """The further costs of shares, without latency, to modules by kind: int64[shares, kinds, len(Quantity)].

    Args:
        tables: modules' costs.
        recompute: the mode that they are of.
        chunk: positions of each share's chunks.
        ranks: members of each share's team.
        element_bytes: of an element of keys and values.
        network: the links that members gather over.
        tensor_parallel: devices of a member.
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
    inside = members_inside(network, tensor_parallel)
    own_gbps = _link_inside(network).gbps
    gbps = np.where(ranks > inside, min(own_gbps, inside * network.inter_node_gbps), own_gbps)
    once_ns = (ranks - 1) * of_member * BITS / gbps
    its[:, Quantity.FORWARD] += np.rint(once_ns).astype(np.int64)
    its[:, Quantity.BACKWARD] += np.rint(gathers_again(recompute) * once_ns).astype(np.int64)
    # Joined keys and values, which are a chunk more than the sample's; their gradients; and, of one, all members'.
    its[:, Quantity.PEAK] += 2 * (of_member * ranks + of_member // 2) + of_member * ranks // 2
    return np.clip(costs, -LARGEST_COST, LARGEST_COST)


def latency_ns(ranks: int | IntArray, network: Network, *, tensor_parallel: int) -> IntArray:
    """What a row of shares waits for the start of its gathers, of keys and of values, once in a layer."""
    is_between = ranks > members_inside(network, tensor_parallel)
    latency_us = np.where(is_between, network.inter_node_latency_us, _link_inside(network).latency_us)
    return np.rint(2_000 * latency_us).astype(np.int64)


def with_latency(tables: CostTables, recompute: Recompute, once_ns: int) -> CostTables:
    """The costs of modules in rows of shares, by what one of them waits for the start of its gathers."""

    def later(values: IntArray) -> IntArray:
        its = values.copy()
        attention = its[tables.kinds.index(ATTENTION)]
        for quantity, times in ((Quantity.FORWARD, 1), (Quantity.BACKWARD, gathers_again(recompute))):
            known = attention[quantity] != ABSENT
            attention[quantity][known] = np.minimum(attention[quantity][known] + times * once_ns, LARGEST_COST)
        return its

    return replace(
        tables,
        values=later(tables.values),
        separate=None if tables.separate is None else later(tables.separate),
        packed=None if tables.packed is None else replace(tables.packed, linear=later(tables.packed.linear)),
    )


def _link_inside(network: Network) -> Link:
    """The one that members in a node gather over: as gathers were measured, else as messages are sent."""
    return network.gathers or Link(latency_us=network.intra_node_latency_us, gbps=network.intra_node_gbps)


def members_inside(network: Network, tensor_parallel: int) -> int:
    """Members of a team that a node holds."""
    return max(network.devices_per_node // tensor_parallel, 1)


def gathers_again(recompute: Recompute) -> int:
    """The gathers of a backward pass, and its reduce-scatter."""
    return 3 if recompute is not Recompute.NONE else 2
