"""The further costs of experts that ranks share: the exchange of tokens, and experts that have more tokens than others.

    every expert layer   tokens ──all-to-all──► experts ──all-to-all──► tokens         and backwards the same

A rank hands p · topk states of its p positions round; (E - 1) / E of them leave it for the other E - 1 ranks. States
for other nodes cross the slower link, which takes longer than the exchange inside a node that runs meanwhile. Under an
imbalance f the busiest rank's experts have f times as many tokens as the mean, and everybody waits for it: their time
and what they keep are taken f times.
"""

from dataclasses import replace

import numpy as np

from megatron_dynapipe.core.costs import ABSENT, CostTables, IntArray, Quantity
from megatron_dynapipe.core.network import Network
from megatron_dynapipe.core.units import Recompute


def with_expert_parallel(
    tables: CostTables,
    network: Network,
    recompute: Recompute,
    *,
    ranks: int,
    tensor_parallel: int = 1,
    imbalance: float = 1.0,
) -> CostTables:
    """The tables of modules whose experts are shared, from tables of modules that have all experts on each rank.

    Args:
        tables: a model's; tables without experts, or with an exchange already, stay as they are.
        network: links between ranks.
        recompute: the tables' mode; full recomputation exchanges tokens once more.
        ranks: that share experts.
        tensor_parallel: ranks that share a layer.
        imbalance: tokens of the busiest rank's experts over the mean.
    """
    state = tables.state
    kind = state.expert_kind
    if kind is None or ranks == 1 or state.expert_parallel > 1:
        return tables
    elsewhere = state.expert_bytes - state.expert_bytes // ranks
    exchange = _Exchange(network, tables.exchange_bytes, imbalance, ranks=ranks, tensor_parallel=tensor_parallel)
    more = _More(tables.kinds.index(kind), exchange, recompute)
    packed = tables.packed
    if packed is not None:
        packed = replace(packed, linear=more.of(packed.linear, packed.row_inputs[:, None]))
    positions = tables.sizes[:, None, None] * tables.inputs[:, None]
    return replace(
        tables,
        values=more.of(tables.values, positions),
        separate=None if tables.separate is None else more.of(tables.separate, positions),
        packed=packed,
        state=replace(
            state,
            modules={**state.modules, kind: state.modules[kind] - elsewhere},
            expert_bytes=state.expert_bytes // ranks,
            expert_parallel=ranks,
        ),
    )


class _More:
    """What sharing adds to modules with experts, which are of the kind numbered `experts`."""

    def __init__(self, experts: int, exchange: "_Exchange", recompute: Recompute) -> None:
        self.experts = experts
        self.exchange = exchange
        self.recompute = recompute

    def of(self, values: IntArray, positions: IntArray) -> IntArray:
        """A grid's values, raised at so many positions for modules with experts."""
        result = values.copy()
        exchange = np.rint(self.exchange.ns(positions)).astype(np.int64)
        more = round((self.exchange.imbalance - 1) * 1000)
        for quantity, times in (
            (Quantity.FORWARD, 2),
            (Quantity.BACKWARD, 4 if self.recompute is Recompute.FULL else 2),
        ):
            mlp = values[self.experts, quantity]
            result[self.experts, quantity] = np.where(
                mlp == ABSENT, ABSENT, mlp + (mlp * more + 500) // 1000 + times * exchange
            )
        kept = values[self.experts, Quantity.STORED] * more // 1000
        # If nobody knows how a layer's peak is divided, attention has all of it; attention comes first.
        peak = self.experts if values[self.experts, Quantity.PEAK].any() else 0
        for kind, quantity in (
            (self.experts, Quantity.STORED),
            (peak, Quantity.PEAK),
            (self.experts, Quantity.ENTRY_PEAK),
        ):
            before = values[kind, quantity]
            result[kind, quantity] = np.where(before == ABSENT, ABSENT, before + kept)
        return result


class _Exchange:
    """An all-to-all of tokens between the ranks that share experts."""

    def __init__(
        self, network: Network, position_bytes: int, imbalance: float, *, ranks: int, tensor_parallel: int
    ) -> None:
        self.network = network
        self.position_bytes = position_bytes
        self.imbalance = imbalance
        self.ranks = ranks
        self.inside = min(ranks, max(network.devices_per_node // tensor_parallel, 1))

    def ns(self, positions: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """The time of one, from so many positions of every rank."""
        n = self.network
        bits = positions * self.position_bytes * 8 * self.imbalance / self.ranks  # for one of the ranks
        near = n.intra_node_latency_us * 1e3 + (self.inside - 1) * bits / n.intra_node_gbps
        if self.inside == self.ranks:
            return np.asarray(near)
        far = n.inter_node_latency_us * 1e3 + (self.ranks - self.inside) * bits / n.inter_node_gbps
        return np.maximum(near, far)
