"""What a piece of a sample costs one layer besides a whole sample of as many positions.

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

from megatron_dynapipe.cost.tables import ABSENT, ENCODER_ROWS, PREFIX_UNIT, IntArray, LayerTables
from megatron_dynapipe.units import Recompute

SUMMED_IN_FP32 = 4
"""Later pieces from which on their gradients of a piece's keys and values are summed in fp32."""
FP32_BYTES = 4


@lru_cache(maxsize=8)  # asked for again with every size of pieces that is tried
def prefix_curvatures(tables: LayerTables) -> tuple[tuple[int, int], ...]:
    """g of each of `ENCODER_ROWS` as (numerator, denominator): ns or bytes by positions².

    From the costs of one sample at the longest length n that was measured, at half of it, and at the shortest, m:
    g = (T(n) - 2 T(n / 2) + T(m)) · 2 / n², at least 0.
    """
    values = tables.values if tables.separate is None else tables.separate
    found = []
    for row in ENCODER_ROWS:
        feasible = np.flatnonzero(values[row, 0, :, 0] != ABSENT)
        if not len(feasible):
            found.append((0, 1))
            continue
        longest = int(tables.inputs[feasible[-1]])
        ends = np.array([longest, longest // 2, int(tables.inputs[feasible[0]])], np.int64)
        at = tables.at_lengths(ends, np.zeros(3, np.int64), separate=True)[:, row, 0].tolist()
        found.append((max(0, at[0] - 2 * at[1] + at[2]) * 2 if ABSENT not in at else 0, longest**2))
    return tuple(found)


def prefix_costs(tables: LayerTables) -> list[tuple[int, int, int, int]]:
    """What a prefix of m positions adds to each of `ENCODER_ROWS`: (once, times m, times m · n, unit), in 1 / unit."""
    if tables.packed is not None and tables.packed.prefix is not None:
        return [(*row, PREFIX_UNIT) for row in tables.packed.prefix.tolist()]
    return [(0, 0, 2 * up, down) for up, down in prefix_curvatures(tables)]


def piece_costs(
    tables: LayerTables,
    recompute: Recompute,
    *,
    own: IntArray,
    before: IntArray,
    later: IntArray,
    element_bytes: int,
) -> IntArray:
    """What pieces cost one layer besides: int64[pieces, rows of `ENCODER_ROWS`], ns and bytes.

    Args:
        tables: one layer's costs.
        recompute: the mode that they are of.
        own: positions of each piece.
        before: positions that the pieces before it hold.
        later: how many later pieces read its keys and values.
        element_bytes: of an element of keys and values.
    """
    costs = _prefixes(tables, own, before)
    gradients = np.where(later < SUMMED_IN_FP32, element_bytes * (later > 0), FP32_BYTES)
    kept = gradients + (element_bytes if recompute is Recompute.FULL else 0)
    costs[:, 2:] += (2 * tables.key_value_channels * own * kept)[:, None]
    return costs


def prefix_of_row(tables: LayerTables, own: IntArray, before: IntArray) -> IntArray:
    """What the prefixes of a row's pieces cost one layer: int64[rows of `ENCODER_ROWS`].

    Args:
        tables: one layer's costs.
        own: positions of each entry.
        before: positions of its sample before them.
    """
    return np.asarray(_prefixes(tables, own, before).sum(axis=0))


def _prefixes(tables: LayerTables, own: IntArray, before: IntArray) -> IntArray:
    """int64[pieces, rows of `ENCODER_ROWS`]; nothing where nothing is before."""
    prefixes = list(zip(before.tolist(), own.tolist(), strict=True))
    columns = [
        [((once + each * m + pair * m * n) * (m > 0) + unit // 2) // unit for m, n in prefixes]
        for once, each, pair, unit in prefix_costs(tables)
    ]
    return np.array(columns, np.int64).T
