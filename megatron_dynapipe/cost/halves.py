"""What half a layer costs: the rows of halves, filled in from those of layers by the proportions of `cost.division`.

A half layer's share depends on lengths, so it is taken at every point of a grid. In packed rows' own tables what is
linear in positions is divided by linears, and attention of each sample is attention's.
"""

from dataclasses import replace

import numpy as np

from megatron_dynapipe.cost.division import Division, Rates
from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row

_PARTS = 2**20
"""Shares are integers of this many parts, so that costs are the same on every machine."""

_Lengths = tuple[IntArray, IntArray]
"""Axes of a grid: input positions and target positions."""


def with_halves(tables: LayerTables) -> LayerTables:
    """The tables with costs of halves, where it is known how a layer's are divided."""
    if not tables.division:
        return tables
    packed, state, by_kind = tables.packed, tables.state, tables.division
    if packed is not None:
        positions = packed.row_inputs, packed.row_targets
        packed = replace(
            packed,
            linear=_filled(packed.linear, tables, positions, linear=True, inside=False),
            attention=_filled(packed.attention, tables, (packed.inputs, packed.targets), linear=False, inside=True),
        )
    lengths = tables.inputs, tables.targets
    separate = tables.separate
    return replace(
        tables,
        values=_filled(tables.values, tables, lengths),
        separate=None if separate is None else _filled(separate, tables, lengths),
        packed=packed,
        state=replace(
            state,
            encoder_attention_bytes=_attention_bytes(state.encoder_bytes, by_kind["encoder"]),
            decoder_attention_bytes=_attention_bytes(
                state.decoder_bytes, by_kind.get("decoder", by_kind.get("expert"))
            ),
        ),
    )


def _attention_bytes(layer: int, division: Division | None) -> int:
    return 0 if division is None else layer * division.parameters[0] // sum(division.parameters)


def _filled(
    values: IntArray, tables: LayerTables, lengths: _Lengths, *, linear: bool = True, inside: bool = True
) -> IntArray:
    """A grid's values with the rows of halves, `ABSENT` where the layer's are.

    Args:
        values: `[len(Row), …, inputs, targets]`.
        tables: of a layer.
        lengths: the grid's axes.
        linear: whether the values hold what is linear in positions.
        inside: whether they hold attention's inside.
    """
    result = values.copy()
    for kind, division in tables.division.items():
        prefix = kind.upper()
        for way in ("FORWARD", "BACKWARD"):
            share = _share(getattr(division, way.lower()), kind == "decoder", lengths, linear, inside)
            result[Row[f"{prefix}_ATTENTION_{way}"]] = _part(values[Row[f"{prefix}_{way}"]], share)
        linears = _share(division.forward, kind == "decoder", lengths, linear=True, inside=False)
        result[Row[f"{prefix}_ATTENTION_WEIGHT"]] = _part(values[Row[f"{prefix}_WEIGHT"]], linears)
        stored = values[Row[f"{prefix}_STORED"]]
        result[Row[f"{prefix}_ATTENTION_STORED"]] = result[Row[f"{prefix}_MLP_STORED"]] = stored
        if division.stored is not None:
            kept = _part(stored, _share(division.stored, kind == "decoder", lengths, linear, inside))
            result[Row[f"{prefix}_ATTENTION_STORED"]] = kept
            result[Row[f"{prefix}_MLP_STORED"]] = np.where(stored == ABSENT, ABSENT, stored - kept)
    return result


def _share(rates: Rates, is_decoder: bool, lengths: _Lengths, linear: bool, inside: bool) -> IntArray:
    """Attention's share at every point, in parts: `[inputs, targets]`."""
    inputs, targets = np.broadcast_arrays(lengths[0][:, None].astype(float), lengths[1].astype(float))
    if not linear and rates.inner:
        return np.full(inputs.shape, _PARTS, np.int64)
    own, keys, memory = (targets, targets + inputs, inputs) if is_decoder else (inputs, inputs, 0 * inputs)
    attention = rates.linear * own + rates.memory * memory + inside * rates.inner * own * keys
    share = attention / np.maximum(attention + rates.mlp * own, 1)
    return np.asarray(np.rint(share * _PARTS), np.int64)


def _part(values: IntArray, share: IntArray) -> IntArray:
    """values · share, rounded; in steps, so that 2^42 · 2^20 does not overflow."""
    quotient, rest = np.divmod(values, _PARTS)
    return np.asarray(np.where(values == ABSENT, ABSENT, quotient * share + (rest * share + _PARTS // 2) // _PARTS))
