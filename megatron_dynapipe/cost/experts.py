"""What experts that ranks share cost besides: the exchange of tokens, and experts that have more tokens than others.

    every expert layer   tokens ──all-to-all──► experts ──all-to-all──► tokens         and backwards the same

A rank hands p · topk states of its p positions round, of which (E - 1) / E leave it for the other E - 1 ranks; those of
other nodes cross the slower link, which takes longer than the exchange inside a node that runs beside it. Under an
imbalance f the busiest rank's experts have f times as many tokens as the mean, and everybody waits for it: their time
and what they keep are taken f times.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.cost.network import Network
from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row
from megatron_dynapipe.units import Recompute

IMBALANCE = 1.25
"""Assumed between ranks that share experts, each of which has several: routers that are trained for balance keep
single experts within a factor of about two (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024)."""


class ExpertParallel(NamedTuple):
    """How experts are shared: by how many ranks, of whose tensor-parallel groups; and the imbalance between them."""

    ranks: int
    tensor_parallel: int
    imbalance: float


def with_expert_parallel(
    tables: LayerTables, parallel: ExpertParallel, network: Network, recompute: Recompute
) -> LayerTables:
    """The tables of layers whose experts are shared, from those of layers that have all experts on each rank.

    Args:
        tables: of a model; those without experts, or already with an exchange, stay as they are.
        parallel: how they are shared.
        network: links between ranks.
        recompute: the tables' mode; full recomputation exchanges tokens once more.
    """
    tables = _in_any_order(tables)
    state, ranks = tables.state, parallel.ranks
    if not state.expert_bytes or ranks == 1 or state.expert_parallel > 1:
        return tables
    kind = "EXPERT" if state.decoder_bytes else "ENCODER"
    elsewhere = state.expert_bytes - state.expert_bytes // ranks
    layer = "decoder_bytes" if kind == "EXPERT" else "encoder_bytes"
    more = _More(kind, parallel, network, tables.exchange_bytes, recompute)
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
            **{layer: getattr(state, layer) - elsewhere},
            expert_bytes=state.expert_bytes // ranks,
            expert_parallel=ranks,
        ),
    )


def _in_any_order(tables: LayerTables) -> LayerTables:
    """The tables with peaks of expert layers that hold for a stage that ends with another, where a model has both.

    Stages add the peak of their last encoder layer to what encoder layers before it keep, as if all came first.
    """
    if not tables.state.expert_bytes or not tables.state.decoder_bytes:
        return tables

    def covered(values: IntArray) -> IntArray:
        result = values.copy()
        other = values[Row.EXPERT_STORED] + values[Row.ENCODER_PEAK] - values[Row.ENCODER_STORED]
        absent = (values[[Row.EXPERT_PEAK, Row.ENCODER_PEAK, Row.ENCODER_STORED]] == ABSENT).any(axis=0)
        result[Row.EXPERT_PEAK] = np.where(absent, values[Row.EXPERT_PEAK], np.maximum(values[Row.EXPERT_PEAK], other))
        result[[Row.EXPERT_ATTENTION_PEAK, Row.EXPERT_MLP_PEAK]] = result[Row.EXPERT_PEAK]
        return result

    packed = None if tables.packed is None else replace(tables.packed, linear=covered(tables.packed.linear))
    separate = None if tables.separate is None else covered(tables.separate)
    return replace(tables, values=covered(tables.values), separate=separate, packed=packed)


class _More(NamedTuple):
    kind: str
    parallel: ExpertParallel
    network: Network
    exchange_bytes: int
    recompute: Recompute

    def of(self, values: IntArray, positions: IntArray) -> IntArray:
        """Rows of a grid, with those of the layers with experts raised at so many positions."""
        result, exchange = values.copy(), np.rint(self._exchange_ns(positions)).astype(np.int64)
        passes = {"FORWARD": 2, "BACKWARD": 4 if self.recompute is Recompute.FULL else 2}
        more = round((self.parallel.imbalance - 1) * 1000)
        for way, times in passes.items():
            layer = values[Row[f"{self.kind}_{way}"]]
            mlp = layer - values[Row[f"{self.kind}_ATTENTION_{way}"]]
            result[Row[f"{self.kind}_{way}"]] = np.where(
                layer == ABSENT, ABSENT, layer + (mlp * more + 500) // 1000 + times * exchange
            )
        kept = values[Row[f"{self.kind}_MLP_STORED"]] * more // 1000
        for row in ("STORED", "MLP_STORED", "PEAK", "MLP_PEAK"):
            before = values[Row[f"{self.kind}_{row}"]]
            result[Row[f"{self.kind}_{row}"]] = np.where(before == ABSENT, ABSENT, before + kept)
        return result

    def _exchange_ns(self, positions: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """One all-to-all, from so many positions of every rank."""
        n, ranks = self.network, self.parallel.ranks
        inside = min(ranks, max(n.devices_per_node // self.parallel.tensor_parallel, 1))
        bits = positions * self.exchange_bytes * 8 * self.parallel.imbalance / ranks  # for one of the ranks
        near = n.intra_node_latency_us * 1e3 + (inside - 1) * bits / n.intra_node_gbps
        if inside == ranks:
            return np.asarray(near)
        return np.maximum(near, n.inter_node_latency_us * 1e3 + (ranks - inside) * bits / n.inter_node_gbps)
