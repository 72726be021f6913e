"""How long the second half of a layer's divided backward pass takes: the gradients of its linear layers' weights.

They multiply as often as these layers' forward pass, so they take the layer's forward without attention's inside, times
what was measured of that (`cost.division`). A layer that is recomputed in full is not divided.
"""

from dataclasses import replace

import numpy as np

from megatron_dynapipe.cost.division import Division
from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row
from megatron_dynapipe.units import Recompute

_PARTS = 2**20
"""Shares are integers of this many parts, so that costs are the same on every machine."""


def with_weights(tables: LayerTables, recompute: Recompute) -> LayerTables:
    """The tables of a recompute mode with the times of second halves; as they are where these are not known."""
    if recompute is Recompute.FULL:
        return tables
    values, separate, packed = tables.values, tables.separate, tables.packed
    for kind, division in tables.division.items():
        row, of = Row[f"{kind.upper()}_WEIGHT"], Row[f"{kind.upper()}_FORWARD"]
        share = _linear_share(division, tables.inputs, tables.targets if kind == "decoder" else None)
        values = _filled(values, row, of, share)
        separate = None if separate is None else _filled(separate, row, of, share)
        if packed is not None:  # attention's inside is apart there
            whole = np.int64(_PARTS * division.weight_per_mille // 1000)
            packed = replace(packed, linear=_filled(packed.linear, row, of, whole))
    return replace(tables, values=values, separate=separate, packed=packed)


def _linear_share(division: Division, inputs: IntArray, targets: IntArray | None) -> IntArray:
    """The second half's share of a layer's forward, in parts: `[inputs, targets]`."""
    rates, e = division.forward, inputs[:, None].astype(float)
    if targets is None:
        linears, inside = e * (rates.linear + rates.mlp), rates.inner * e * e
    else:
        d = targets[None, :].astype(float)
        linears, inside = d * (rates.linear + rates.mlp) + rates.memory * e, rates.inner * d * (d + e)
    share = linears / np.maximum(linears + inside, 1) * division.weight_per_mille / 1000
    return np.asarray(np.rint(share * _PARTS), np.int64)


def _filled(values: IntArray, row: Row, of: Row, share: IntArray | np.int64) -> IntArray:
    """A grid's values with a row of second halves, `ABSENT` where the forward is."""
    result = values.copy()
    quotient, rest = np.divmod(values[of], _PARTS)  # in steps: 2^42 times 2^20 parts leaves no room in 64 bits
    result[row] = np.where(values[of] == ABSENT, ABSENT, quotient * share + (rest * share + _PARTS // 2) // _PARTS)
    return result
