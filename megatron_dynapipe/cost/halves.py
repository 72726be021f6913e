"""What half a layer costs where halves were not measured: the layer's cost, divided.

Times are divided by floating-point operations. With h the hidden size, c = heads × channels, f the feed-forward size, a
sample of e encoder and d decoder positions takes

    encoder, decoder-only   attention e (8 h c + 4 c e)                      MLP 4 e h f
    decoder                 attention d (12 h c + 4 c d + 4 c e) + 4 e h c   MLP 4 d h f

Of stored activations attention keeps 13 of 34 parts, the MLP 21 (Korthikanti et al., 2022, section 4.1); under full
recomputation each half keeps its input, as the layer does. Parameters are 4 h c (a decoder's 8 h c) to 2 h f.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row
from megatron_dynapipe.units import Recompute

_Floats = npt.NDArray[np.float64]
_STORED_SHARES = (13, 21)
"""Of attention and of the MLP."""
_PARTS_PER_UNIT = 2**20
"""Shares are integers of this many parts, so that costs are the same on every machine."""

# (layer, its attention's half) for forward, backward and stored; and the MLP's stored
_ENCODER = (
    (Row.ENCODER_FORWARD, Row.ENCODER_ATTENTION_FORWARD),
    (Row.ENCODER_BACKWARD, Row.ENCODER_ATTENTION_BACKWARD),
    (Row.ENCODER_STORED, Row.ENCODER_ATTENTION_STORED, Row.ENCODER_MLP_STORED),
)
_DECODER = (
    (Row.DECODER_FORWARD, Row.DECODER_ATTENTION_FORWARD),
    (Row.DECODER_BACKWARD, Row.DECODER_ATTENTION_BACKWARD),
    (Row.DECODER_STORED, Row.DECODER_ATTENTION_STORED, Row.DECODER_MLP_STORED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWidths:
    """Hidden size, width of attention (heads × channels) and of the feed-forward network."""

    hidden: int
    attention: int
    ffn: int


def with_halves(tables: LayerTables, widths: LayerWidths, recompute: Recompute) -> LayerTables:
    """The tables with costs of halves, by the rule above."""
    h, c, f = widths.hidden, widths.attention, widths.ffn
    packed, state = tables.packed, tables.state
    if packed is not None:
        linear = _shares(widths, packed.row_inputs, packed.row_targets, inside=False)
        packed = replace(
            packed,
            linear=_divided(packed.linear, linear, recompute),
            attention=_divided(packed.attention, (_PARTS_PER_UNIT, _PARTS_PER_UNIT), recompute),
        )
    shares = _shares(widths, tables.inputs, tables.targets, inside=True)
    return replace(
        tables,
        values=_divided(tables.values, shares, recompute),
        separate=None if tables.separate is None else _divided(tables.separate, shares, recompute),
        packed=packed,
        state=replace(
            state,
            encoder_attention_bytes=state.encoder_bytes * 4 * c // (4 * c + 2 * f),
            decoder_attention_bytes=state.decoder_bytes * 8 * c // (8 * c + 2 * f),
        ),
    )


def _shares(widths: LayerWidths, inputs: IntArray, targets: IntArray, *, inside: bool) -> tuple[IntArray, IntArray]:
    """Attention's share of an encoder and of a decoder layer's operations, in parts: `[inputs, targets]` each.

    Args:
        widths: of the model.
        inputs, targets: positions.
        inside: whether attention's products are counted, or linears alone.
    """
    h, c, f = widths.hidden, widths.attention, widths.ffn
    e, d = inputs[:, None].astype(float), targets[None, :].astype(float)
    encoder = e * (8 * h * c + 4 * c * e * inside)
    decoder = d * (12 * h * c + 4 * c * (d + e) * inside) + 4 * e * h * c
    return _in_parts(encoder, 4 * e * h * f), _in_parts(decoder, 4 * d * h * f)


def _in_parts(attention: _Floats, mlp: _Floats) -> IntArray:
    return np.asarray(np.rint(attention / np.maximum(attention + mlp, 1) * _PARTS_PER_UNIT), np.int64)


def _divided(values: IntArray, shares: tuple[IntArray | int, IntArray | int], recompute: Recompute) -> IntArray:
    """A grid's values with the rows of halves filled in, `ABSENT` where the layer's are."""
    result = values.copy()

    def fill(row: Row, of: Row, parts: IntArray | int, whole: int) -> None:
        result[row] = np.where(values[of] == ABSENT, ABSENT, _nearest(values[of], parts, whole))

    for (forward, backward, stored), share in zip((_ENCODER, _DECODER), shares, strict=True):
        for of, row in (forward, backward):
            fill(row, of, share, _PARTS_PER_UNIT)
        of, *halves = stored
        for row, part in zip(halves, _STORED_SHARES, strict=True):
            fill(row, of, *((1, 1) if recompute is Recompute.FULL else (part, sum(_STORED_SHARES))))
    return result


def _nearest(values: IntArray, parts: IntArray | int, whole: int) -> IntArray:
    """values · parts / whole, rounded; in steps, so that 2^42 · 2^20 does not overflow."""
    quotient, rest = np.divmod(values, whole)
    return np.asarray(quotient * parts + (rest * parts + whole // 2) // whole)
