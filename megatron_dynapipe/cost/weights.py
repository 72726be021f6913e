"""How long the second half of a layer's divided backward pass takes, where that was not measured.

The weights' gradients of the linear layers take as many operations as their forward pass: so as long as the layer's
forward, but for attention's inside. Of a sample's operations, with h the hidden size, c = heads × channels and f the
feed-forward size, these are

    encoder, decoder-only   linears e (8 h c + 4 h f)               attention's inside 4 c e²
    decoder                 linears d (12 h c + 4 h f) + 4 e h c    attention's inside 4 c d (d + e)

A layer that is recomputed in full is not divided.
"""

from dataclasses import replace

import numpy as np

from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row
from megatron_dynapipe.units import Recompute

_PARTS = 2**20
"""Shares are integers of this many parts, so that costs are the same on every machine."""
_ROWS = ((Row.ENCODER_WEIGHT, Row.ENCODER_FORWARD), (Row.DECODER_WEIGHT, Row.DECODER_FORWARD))


def with_weights(tables: LayerTables, widths: tuple[int, int, int], recompute: Recompute) -> LayerTables:
    """The tables with the times of second halves, by the rule above.

    Args:
        tables: of a layer.
        widths: hidden size, heads × channels, feed-forward size; 0 where one is not known.
        recompute: the mode that the tables are of.
    """
    if recompute is Recompute.FULL or not all(widths):
        return tables
    packed = tables.packed
    if packed is not None:  # attention's inside is apart there
        packed = replace(packed, linear=_filled(packed.linear, (_PARTS, _PARTS)))
    shares = _linear_shares(widths, tables.inputs, tables.targets)
    separate = None if tables.separate is None else _filled(tables.separate, shares)
    return replace(tables, values=_filled(tables.values, shares), separate=separate, packed=packed)


def _linear_shares(widths: tuple[int, int, int], inputs: IntArray, targets: IntArray) -> tuple[IntArray, IntArray]:
    """The linears' share of an encoder and of a decoder layer's operations, in parts: `[inputs, targets]` each."""
    h, c, f = widths
    e, d = inputs[:, None].astype(float), targets[None, :].astype(float)
    kinds = (
        (e * (8 * h * c + 4 * h * f), 4 * c * e * e),
        (d * (12 * h * c + 4 * h * f) + 4 * e * h * c, 4 * c * d * (d + e)),
    )
    encoder, decoder = (np.rint(linears / np.maximum(linears + inside, 1) * _PARTS) for linears, inside in kinds)
    return encoder.astype(np.int64), decoder.astype(np.int64)


def _filled(values: IntArray, shares: tuple[IntArray | int, IntArray | int]) -> IntArray:
    """A grid's values with the rows of second halves, `ABSENT` where the forward is."""
    result = values.copy()
    for (row, of), parts in zip(_ROWS, shares, strict=True):
        quotient, rest = np.divmod(values[of], _PARTS)  # in steps: 2^42 · 2^20 parts would not fit 64 bits with room
        result[row] = np.where(values[of] == ABSENT, ABSENT, quotient * parts + (rest * parts + _PARTS // 2) // _PARTS)
    return result
