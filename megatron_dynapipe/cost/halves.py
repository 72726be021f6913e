"""What parts of a layer cost: its attention, its MLP, and the gradients of its linear layers' weights.

Their rows are filled in from those of layers by the proportions of `cost.division`. A share depends on lengths, so it
is taken at every point of a grid. In packed rows' own tables what is linear in positions is divided by linears, and
attention of each sample is attention's.

Weight gradients, the second half of a divided backward pass, multiply as often as linear layers' forward pass: they
take the layer's forward without attention's inside, times what was measured of that. A layer that is recomputed in full
is not divided.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_dynapipe.cost.division import PEAK_UNIT, Division, Kind, Peak, Rates
from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row
from megatron_dynapipe.cost.work import Floats
from megatron_dynapipe.units import Recompute

_PARTS = 2**20
"""Shares are integers of this many parts, so that costs are the same on every machine."""

_Lengths = tuple[IntArray, IntArray]
"""Axes of a grid: input positions and target positions."""


def with_parts(tables: LayerTables, recompute: Recompute) -> LayerTables:
    """The tables of a recompute mode with the costs of parts, where it is known how a layer's are divided."""
    if not tables.division:
        return tables
    packed, state, by_kind = tables.packed, tables.state, tables.division
    divided = recompute is not Recompute.FULL
    if packed is not None:
        of_rows = packed.division or by_kind
        positions, samples = (packed.row_inputs, packed.row_targets), (packed.inputs, packed.targets)
        packed = replace(
            packed,
            linear=_filled(packed.linear, of_rows, positions, weights=divided, inside=False),
            attention=_filled(packed.attention, of_rows, samples, weights=False, linear=False),
        )
    lengths, separate = (tables.inputs, tables.targets), tables.separate
    filled = partial(_filled, by_kind=by_kind, lengths=lengths, weights=divided, sizes=tables.sizes[:, None, None])
    decoder = by_kind.get("decoder", by_kind.get("expert"))
    return replace(
        tables,
        values=filled(tables.values),
        separate=None if separate is None else filled(separate),
        packed=packed,
        state=replace(
            state,
            encoder_attention_bytes=_attention_bytes(state.encoder_bytes, by_kind["encoder"]),
            decoder_attention_bytes=_attention_bytes(state.decoder_bytes, decoder),
        ),
    )


def _attention_bytes(layer: int, division: Division | None) -> int:
    return 0 if division is None else layer * division.parameters[0] // sum(division.parameters)


def _filled(
    values: IntArray,
    by_kind: Mapping[Kind, Division],
    lengths: _Lengths,
    *,
    weights: bool,
    sizes: IntArray | int = 1,
    linear: bool = True,
    inside: bool = True,
) -> IntArray:
    """A grid's values with the rows of parts, `ABSENT` where the layer's are.

    Args:
        values: `[len(Row), …, inputs, targets]`.
        by_kind: how layers' costs are divided.
        lengths: the grid's axes.
        weights: whether to fill in times of weight gradients.
        sizes: samples of a micro-batch, where the grid has an axis of them: `[sizes, 1, 1]`.
        linear: whether the values hold what is linear in positions.
        inside: whether they hold attention's inside.
    """
    result = values.copy()
    for kind, division in by_kind.items():
        prefix, is_decoder = kind.upper(), kind == "decoder"
        if weights:
            share = _weight_share(division, is_decoder, lengths, inside)
            result[Row[f"{prefix}_WEIGHT"]] = _part(values[Row[f"{prefix}_FORWARD"]], share)
        for way in ("FORWARD", "BACKWARD"):
            share = _attention_share(getattr(division, way.lower()), is_decoder, lengths, linear, inside)
            result[Row[f"{prefix}_ATTENTION_{way}"]] = _part(values[Row[f"{prefix}_{way}"]], share)
        linears = _attention_share(division.forward, is_decoder, lengths, linear=True, inside=False)
        result[Row[f"{prefix}_ATTENTION_WEIGHT"]] = _part(result[Row[f"{prefix}_WEIGHT"]], linears)
        stored, peak = values[Row[f"{prefix}_STORED"]], values[Row[f"{prefix}_PEAK"]]
        shares = (_attention_share(rates, is_decoder, lengths, linear, inside) for rates in division.stored)
        attention, besides = (_part(stored, share) for share in shares)
        result[Row[f"{prefix}_ATTENTION_STORED"]] = attention
        result[Row[f"{prefix}_MLP_STORED"]] = np.where(stored == ABSENT, ABSENT, stored - besides)
        peaks = (peak, peak)
        if division.peak is not None:
            known = (
                each.once + sizes * _attention(each, is_decoder, lengths, inside) / PEAK_UNIT for each in division.peak
            )
            peaks = tuple(np.minimum(peak, np.floor(each)).astype(np.int64) for each in known)
        result[Row[f"{prefix}_ATTENTION_PEAK"]], result[Row[f"{prefix}_MLP_PEAK"]] = peaks
    return result


def _attention(rates: Rates | Peak, is_decoder: bool, lengths: _Lengths, inside: bool) -> Floats:
    """What the rates of attention, or of a peak, make at every point: `[inputs, targets]`."""
    own, keys, memory = _positions(is_decoder, lengths)
    return np.asarray(rates.linear * own + rates.memory * memory + inside * rates.inner * own * keys)


def _attention_share(rates: Rates, is_decoder: bool, lengths: _Lengths, linear: bool, inside: bool) -> IntArray:
    """Attention's share at every point, in parts: `[inputs, targets]`."""
    own, _, _ = _positions(is_decoder, lengths)
    if not linear and rates.inner:
        return np.full(own.shape, _PARTS, np.int64)
    attention = _attention(rates, is_decoder, lengths, inside)
    return np.asarray(np.rint(attention / np.maximum(attention + rates.mlp * own, 1) * _PARTS), np.int64)


def _weight_share(division: Division, is_decoder: bool, lengths: _Lengths, inside: bool) -> IntArray:
    """Weight gradients' share of a layer's forward, in parts: `[inputs, targets]`."""
    own, keys, memory = _positions(is_decoder, lengths)
    if not inside:
        return np.full(own.shape, _PARTS * division.weight_per_mille // 1000, np.int64)
    rates = division.forward
    linears = own * (rates.linear + rates.mlp) + rates.memory * memory
    share = linears / np.maximum(linears + rates.inner * own * keys, 1) * division.weight_per_mille / 1000
    return np.asarray(np.rint(share * _PARTS), np.int64)


def _positions(is_decoder: bool, lengths: _Lengths) -> tuple[Floats, Floats, Floats]:
    """A layer's own positions, its keys', and the encoder's output's, at every point: `[inputs, targets]` each."""
    inputs, targets = np.broadcast_arrays(lengths[0][:, None].astype(float), lengths[1].astype(float))
    return (targets, targets + inputs, inputs) if is_decoder else (inputs, inputs, 0 * inputs)


def _part(values: IntArray, share: IntArray) -> IntArray:
    """values · share, rounded; in steps, so that 2^42 · 2^20 does not overflow."""
    quotient, rest = np.divmod(values, _PARTS)
    return np.asarray(np.where(values == ABSENT, ABSENT, quotient * share + (rest * share + _PARTS // 2) // _PARTS))
