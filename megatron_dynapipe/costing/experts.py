"""The further costs of experts that ranks share: the exchange of tokens, and experts that have more tokens than others.

    every expert layer   tokens ──all-to-all──► experts ──all-to-all──► tokens         and backwards the same

A rank hands p · topk states of its p positions round, of which (E - 1) / E leave it for the other E - 1 ranks; those of
other nodes cross the slower link, which takes longer than the exchange inside a node that runs beside it. Under an
imbalance f the busiest rank's experts have f times as many tokens as the mean, and everybody waits for it: their time
and what they keep are taken f times.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.core.costs import ABSENT, CostTables, IntArray, Quantity
from megatron_dynapipe.core.network import Network
from megatron_dynapipe.core.units import Recompute


class ExpertParallel(NamedTuple):
    """How experts are shared: by how many ranks, of whose tensor-parallel groups; and the imbalance between them."""

    ranks: int
    tensor_parallel: int
    imbalance: float


def with_expert_parallel(
    tables: CostTables, parallel: ExpertParallel, network: Network, recompute: Recompute
) -> CostTables:
    """The tables of modules whose experts are shared, from those of modules that have all experts on each rank.

    Args:
        tables: of a model; those without experts, or already with an exchange, stay as they are.
        parallel: how they are shared.
        network: links between ranks.
        recompute: the tables' mode; full recomputation exchanges tokens once more.
    """
    state = tables.state
    ranks = parallel.ranks
    kind = state.expert_kind
    if kind is None or ranks == 1 or state.expert_parallel > 1:
        return tables
    elsewhere = state.expert_bytes - state.expert_bytes // ranks
    more = _More(tables.kinds.index(kind), parallel, network, tables.exchange_bytes, recompute)
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

    def __init__(
        self, experts: int, parallel: ExpertParallel, network: Network, exchange_bytes: int, recompute: Recompute
    ) -> None:
        self.experts = experts
        self.parallel = parallel
        self.network = network
        self.exchange_bytes = exchange_bytes
        self.recompute = recompute

    def of(self, values: IntArray, positions: IntArray) -> IntArray:
        """A grid's values with those of modules with experts raised at so many positions."""
        result, exchange = values.copy(), np.rint(self._exchange_ns(positions)).astype(np.int64)
        more = round((self.parallel.imbalance - 1) * 1000)
        for quantity, times in (
            (Quantity.FORWARD, 2),
            (Quantity.BACKWARD, 4 if self.recompute is Recompute.FULL else 2),
        ):
            mlp = values[self.experts, quantity]
            result[self.experts, quantity] = np.where(
                mlp == ABSENT, ABSENT, mlp + (mlp * more + 500) // 1000 + times * exchange
            )
        kept = values[self.experts, Quantity.STORED] * more // 1000
        # Where nobody knows how a layer's peak is divided, attention has all of it; attention comes first.
        peak = self.experts if values[self.experts, Quantity.PEAK].any() else 0
        for kind, quantity in (
            (self.experts, Quantity.STORED),
            (peak, Quantity.PEAK),
            (self.experts, Quantity.ENTRY_PEAK),
        ):
            before = values[kind, quantity]
            result[kind, quantity] = np.where(before == ABSENT, ABSENT, before + kept)
        return result

    def _exchange_ns(self, positions: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """One all-to-all, from so many positions of every rank."""
        n = self.network
        ranks = self.parallel.ranks
        inside = min(ranks, max(n.devices_per_node // self.parallel.tensor_parallel, 1))
        bits = positions * self.exchange_bytes * 8 * self.parallel.imbalance / ranks  # for one of the ranks
        near = n.intra_node_latency_us * 1e3 + (inside - 1) * bits / n.intra_node_gbps
        if inside == ranks:
            return np.asarray(near)
        return np.maximum(near, n.inter_node_latency_us * 1e3 + (ranks - inside) * bits / n.inter_node_gbps)
