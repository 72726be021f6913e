"""What a piece of a sample costs a layer more than a whole sample of as many positions.

A sample is cut along its sequence into pieces that run one after another, each with the keys and values of those before
it. With n own positions after m earlier ones a piece costs what a whole sample of n positions does, and

- attending to the prefix: as it was measured (`PackedTables.prefix`), else 2 g m n in time and activations, where
  T(l) = u + v l + g l² is a layer's cost of a micro-batch of one sample of l positions: attention is quadratic, the
  rest is not;
- the gradients of its keys and values, if a later piece reads them, in fp32 where many do; under full recomputation
  keys and values too, which are kept for every piece.
"""

from functools import lru_cache

import numpy as np

from megatron_dynapipe.core.costs import (
    ABSENT,
    ATTENTION,
    HEAD,
    LARGEST_COST,
    PREFIX_QUANTITIES,
    PREFIX_UNIT,
    CostTables,
    Division,
    Floats,
    IntArray,
    Quantity,
    Rates,
)
from megatron_dynapipe.core.units import Recompute

SUMMED_IN_FP32 = 4
"""Later pieces from which on their gradients of a piece's keys and values are summed in fp32."""
FP32_BYTES = 4


@lru_cache(maxsize=8)  # asked for again with every size of pieces that is tried
def prefix_curvatures(tables: CostTables) -> tuple[tuple[int, int], ...]:
    """g of each of `PREFIX_QUANTITIES` as (numerator, denominator): ns or bytes by positions².

    From the costs of one sample at the longest length n that was measured, at half of it, and at the shortest, m:
    g = (T(n) - 2 T(n / 2) + T(m)) · 2 / n², at least 0.
    """
    attention, mlp = tables.values[:2] if tables.separate is None else tables.separate[:2]
    curvatures = []
    for quantity in PREFIX_QUANTITIES:
        feasible = np.flatnonzero((attention[quantity, 0, :, 0] != ABSENT) & (mlp[quantity, 0, :, 0] != ABSENT))
        if not len(feasible):
            curvatures.append((0, 1))
            continue
        longest = int(tables.inputs[feasible[-1]])
        ends = np.array([longest, longest // 2, int(tables.inputs[feasible[0]])], np.int64)
        modules = tables.at_lengths(ends, np.zeros(3, np.int64), separate=True)[:, :2, quantity, 0]
        at = modules.sum(axis=1).tolist()
        curvatures.append((max(0, at[0] - 2 * at[1] + at[2]) * 2 if (modules != ABSENT).all() else 0, longest**2))
    return tuple(curvatures)


def prefix_costs(tables: CostTables) -> list[tuple[int, int, int, int]]:
    """The costs that a prefix of m positions adds to `PREFIX_QUANTITIES`: (once, times m, times m · n, unit)."""
    if tables.packed is not None and tables.packed.prefix is not None:
        return [(*row, PREFIX_UNIT) for row in tables.packed.prefix.tolist()]
    return [(0, 0, 2 * up, down) for up, down in prefix_curvatures(tables)]


def piece_costs(
    tables: CostTables,
    recompute: Recompute,
    *,
    positions: IntArray,
    before: IntArray,
    later: IntArray,
    element_bytes: int,
) -> IntArray:
    """The further costs of pieces to modules by kind: int64[pieces, kinds, len(Quantity)], ns and bytes.

    In measured packed rows all of it is attention's. If rows are derived from padded micro-batches, the layer's cost
    with its prefix is divided as one without, by the operations over all keys.

    Args:
        tables: modules' costs.
        recompute: the mode that they are of.
        positions: each piece's.
        before: positions that the pieces before it hold.
        later: how many later pieces read its keys and values.
        element_bytes: bytes of an element of keys and values.
    """
    costs = np.zeros((len(positions), 2, len(Quantity)), np.int64)
    costs[:, 0, : len(PREFIX_QUANTITIES)] = _prefixes(tables, positions, before)
    gradients = np.where(later < SUMMED_IN_FP32, element_bytes * (later > 0), FP32_BYTES)
    kept = gradients + (element_bytes if recompute is Recompute.FULL else 0)
    costs[:, 0, [Quantity.STORED, Quantity.PEAK]] += (2 * tables.key_value_channels * positions * kept)[:, None]
    if tables.packed is None and tables.division is not None:
        _divide(costs, tables, tables.division, recompute, positions, before)
    # An MLP's peak lies above what its attention stores, a piece's too.
    costs[:, 1, Quantity.PEAK] = np.maximum(costs[:, 0, Quantity.PEAK] - costs[:, 0, Quantity.STORED], 0)
    costs = np.clip(costs, -LARGEST_COST, LARGEST_COST)  # at the limit no stage has room for it
    by_kind = np.zeros((len(positions), len(tables.kinds), len(Quantity)), np.int64)
    for number, kind in enumerate(tables.kinds):
        if kind != HEAD:
            by_kind[:, number] = costs[:, int(kind != ATTENTION)]
    return by_kind


def _divide(
    costs: IntArray, tables: CostTables, division: Division, recompute: Recompute, positions: IntArray, before: IntArray
) -> None:
    attention, mlp = costs[:, 0], costs[:, 1]
    layers = _large_micro_batches(tables, positions)
    for quantity, rates in ((Quantity.FORWARD, division.forward), (Quantity.BACKWARD, division.backward)):
        whole, prefix = layers[:, quantity], attention[:, quantity].copy()
        (_, mlp_before, _), (linears, rest, _) = (
            _shares(rates, positions, positions),
            _shares(rates, positions, positions + before),
        )
        mlp[:, quantity] = np.rint((whole + prefix) * rest - whole * mlp_before)
        attention[:, quantity] -= mlp[:, quantity]
        # Weight gradients that were measured know nothing of keys; others have the forward's.
        if quantity is Quantity.FORWARD and recompute is not Recompute.FULL and division.weights is None:
            linears_before = _shares(rates, positions, positions)[0]
            attention[:, Quantity.WEIGHT] = np.rint((whole + prefix) * linears - whole * linears_before)
            mlp[:, Quantity.WEIGHT] = mlp[:, quantity]
    stored = attention[:, Quantity.STORED].copy()
    after_attention, alone = (1 - _shares(rates, positions, positions)[2] for rates in division.stored)
    mlp[:, Quantity.STORED] = np.rint(stored * after_attention)
    attention[:, Quantity.STORED] -= mlp[:, Quantity.STORED]
    mlp[:, Quantity.ENTRY_STORED] = np.maximum(np.rint(stored * (alone - after_attention)), 0)
    mlp[:, Quantity.ENTRY_PEAK] = attention[:, Quantity.PEAK]


def _shares(rates: Rates, positions: IntArray, keys: IntArray) -> tuple[Floats, Floats, Floats]:
    """The shares of attention's linears, of the MLP, and of attention in a layer's cost: `[pieces]` each."""
    linears, inside, mlp = rates.linear * positions, rates.inner * positions * keys, rates.mlp * positions
    total = np.maximum(linears + inside + mlp, 1)
    return linears / total, mlp / total, (linears + inside) / total


def _large_micro_batches(tables: CostTables, positions: IntArray) -> Floats:
    """A layer's costs of one sample in the largest padded micro-batch that was measured: `[pieces, len(Quantity)]`."""
    by_size = tables.at_lengths(positions, np.zeros_like(positions), separate=True)[:, :2]
    known = (by_size[:, :, : len(PREFIX_QUANTITIES)] != ABSENT).all(axis=(1, 2))
    largest = np.maximum(known.shape[1] - 1 - np.argmax(known[:, ::-1], axis=1), 0)
    layers = by_size.sum(axis=1)[np.arange(len(positions)), :, largest]
    return np.asarray(np.maximum(layers, 0) / tables.sizes[largest][:, None])


def _prefixes(tables: CostTables, positions: IntArray, before: IntArray) -> IntArray:
    """int64[pieces, len(PREFIX_QUANTITIES)]; nothing where nothing is before."""
    prefixes = list(zip(before.tolist(), positions.tolist(), strict=True))
    columns = [
        [((once + single * m + pair * m * n) * (m > 0) + unit // 2) // unit for m, n in prefixes]
        for once, single, pair, unit in prefix_costs(tables)
    ]
    return np.array(columns, np.int64).T
