"""Correcting a cost model by passes that were measured while training.

A pass of a stage is predicted as a sum over its layers and the head. A correction scales each kind of them and adds a
constant per layer, for what a layer's own profile does not see (loading, hooks, an emptier cache):

    measured ≈ Σ layers · (scale · table + offset) + head scale · head table

Where stages end inside layers, those with more attention than MLP say what of a layer is attention, and the division
between the two is corrected as well. Of two stages, one has more attention and the other the head, which cannot be told
apart: each moves a little, and what the stages take is right.

Scales and offsets are integers, applied in integers, so that a corrected model is the same wherever it is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_dynapipe.cost.division import LARGEST_RATE, Division, Kind, Rates
from megatron_dynapipe.cost.halves import with_parts
from megatron_dynapipe.cost.layout import PipelineLayout
from megatron_dynapipe.cost.packed import packed_layer_costs
from megatron_dynapipe.cost.pieces import prefix_of_row
from megatron_dynapipe.cost.surface import Floats, nonnegative_least_squares
from megatron_dynapipe.cost.tables import ABSENT, ENCODER_ROWS, IntArray, LayerTables, Row
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import Recompute, Shape

UNIT = 1000
"""Scales are in thousandths."""

_FORWARD = (Row.ENCODER_FORWARD, Row.DECODER_FORWARD, Row.HEAD_FORWARD)
_BACKWARD = (Row.ENCODER_BACKWARD, Row.DECODER_BACKWARD, Row.HEAD_BACKWARD)
_ATTENTION = {
    Row.ENCODER_FORWARD: Row.ENCODER_ATTENTION_FORWARD,
    Row.ENCODER_BACKWARD: Row.ENCODER_ATTENTION_BACKWARD,
    Row.DECODER_FORWARD: Row.DECODER_ATTENTION_FORWARD,
    Row.DECODER_BACKWARD: Row.DECODER_ATTENTION_BACKWARD,
}
_PULL = 0.05
"""Weight with which a scale is held to the common one, against that of one measured pass per kind."""
_OFFSET_PULL = 10.0
"""The same of the offset, held to 0: passes of one size cannot tell it from a scale, and a large one makes plans choose
fewer and larger micro-batches, which can tell it even less."""
_MOST_SHARE = 0.98
"""Of a layer that attention can be found to take, and that the MLP can."""
_ROBUST_STEPS = 6
_LEAST_SCALE = 0.05
_OWN_PASSES = 24
"""Measured passes of padded (or packed) micro-batches from which these get their own correction."""


class PassSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One micro-batch's passes on one virtual stage, as measured; 0 where a pass was not run.

    Of a packed row, `inputs` and `targets` are the positions of its samples; padded micro-batches have none. Where it
    holds pieces, `before` are the positions that earlier pieces of each sample hold.
    """

    stage: int
    shape: Shape
    recompute: Recompute
    forward_ns: int
    backward_ns: int
    inputs: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    before: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Scale (in thousandths) of every row of times, and what is added per layer of a forward and of a backward.

    `odds` multiply attention's part of a layer against the MLP's, in thousandths, where passes tell them apart; they do
    not change the layer's time.
    """

    scales: Mapping[Row, int]
    forward_offset_ns: int
    backward_offset_ns: int
    odds: Mapping[Row, int] = field(default_factory=dict)


def fit_correction(
    samples: Sequence[PassSample], tables: Mapping[Recompute, LayerTables], layout: PipelineLayout
) -> Correction:
    """The correction that explains the measured passes best.

    Args:
        samples: of any stages.
        tables: the model to be corrected, under every recompute mode of the samples.
        layout: layers per virtual stage.

    Raises:
        CostModelError: no sample can be used, or one has a recompute mode or a stage that the run does not have.
    """
    if unknown := {sample.recompute for sample in samples} - tables.keys():
        raise CostModelError(f"passes were measured under recompute {sorted(unknown)}, which the model does not have")
    if samples and max(sample.stage for sample in samples) >= layout.virtual_stages:
        raise CostModelError(f"expected passes of {layout.virtual_stages} virtual stages, got more")
    predicted = np.array([_unit_costs(sample, tables[sample.recompute]) for sample in samples]).reshape(-1, len(Row))
    forward = _fit(samples, predicted, layout, _FORWARD, [sample.forward_ns for sample in samples])
    backward = _fit(samples, predicted, layout, _BACKWARD, [sample.backward_ns for sample in samples])
    scales = dict(zip((*_FORWARD, *_BACKWARD), (*forward[0], *backward[0]), strict=True))
    return Correction(
        scales=scales, forward_offset_ns=forward[1], backward_offset_ns=backward[1], odds=forward[2] | backward[2]
    )


class Corrections(NamedTuple):
    """Of padded micro-batches, and of packed rows with costs of their own."""

    padded: Correction
    packed: Correction


def fit_corrections(
    samples: Sequence[PassSample], tables: Mapping[Recompute, LayerTables], layout: PipelineLayout
) -> Corrections:
    """A correction for each layout: from its own passes if these are enough and its costs are its own.

    Args and raises: see `fit_correction`.
    """
    common = fit_correction(samples, tables, layout)
    if any(grid.packed is None for grid in tables.values()):
        return Corrections(common, common)
    by_layout = ([each for each in samples if bool(each.inputs) is packed] for packed in (False, True))
    return Corrections(
        *(fit_correction(own, tables, layout) if len(own) >= _OWN_PASSES else common for own in by_layout)
    )


def corrected(tables: LayerTables, correction: Correction, packed: Correction | None = None) -> LayerTables:
    """The grids under a correction; memory and what is infeasible stay as they are.

    Args:
        tables: of a layer.
        correction: of the padded grid.
        packed: of packed rows' own grids, where there are any; None: the same.
    """
    offsets = _offsets(correction, tables)
    values = _scaled(tables.values, correction, offsets)
    values[:, tables.values[0] == ABSENT] = ABSENT
    rows = tables.packed
    if rows is not None:
        own = packed or correction
        linear = _scaled(rows.linear, own, _offsets(own, tables))
        prefix = rows.prefix
        if prefix is not None:
            scales = np.array([own.scales.get(row, UNIT) for row in ENCODER_ROWS])
            prefix = (prefix * scales[:, None] + UNIT // 2) // UNIT
        rows = replace(
            rows,
            linear=linear,
            attention=_scaled(rows.attention, own, {}),
            prefix=prefix,
            division=_divided(rows.division, own),
        )
    scaled = replace(tables, values=values, separate=None, packed=rows, division=_divided(tables.division, correction))
    is_divided = (tables.values[Row.ENCODER_WEIGHT] > 0).any()  # nothing is that is recomputed in full
    return with_parts(scaled, Recompute.NONE if is_divided else Recompute.FULL)


def _divided(division: Mapping[Kind, Division], correction: Correction) -> Mapping[Kind, Division]:
    """The proportions of times with attention's multiplied."""

    def rates(kind: Kind, way: str) -> Rates:
        found: Rates = getattr(division[kind], way)
        odds = correction.odds.get(Row[f"{kind}_{way}".upper()], UNIT)
        if odds == UNIT:
            return found
        parts = (found.linear * odds, found.inner * odds, found.mlp * UNIT, found.memory * odds)
        step = max(parts) // LARGEST_RATE + 1
        return Rates(*(part // step for part in parts))

    return {
        kind: msgspec.structs.replace(each, forward=rates(kind, "forward"), backward=rates(kind, "backward"))
        for kind, each in division.items()
    }


def _offsets(correction: Correction, tables: LayerTables) -> dict[Row, int]:
    """Added once per layer, in ns."""
    forward, backward = correction.forward_offset_ns, correction.backward_offset_ns
    offsets = {Row.ENCODER_FORWARD: forward, Row.ENCODER_BACKWARD: backward}
    if tables.state.decoder_bytes:
        offsets |= {Row.DECODER_FORWARD: forward, Row.DECODER_BACKWARD: backward}
    return offsets


def _scaled(values: IntArray, correction: Correction, offsets: Mapping[Row, int]) -> IntArray:
    """A grid's rows scaled and shifted where they are known."""
    result = values.copy()
    for row, scale in correction.scales.items():
        known = (values[row] * scale + UNIT // 2) // UNIT + offsets.get(row, 0)
        result[row] = np.where(values[row] == ABSENT, ABSENT, known)
    return result


def _unit_costs(sample: PassSample, tables: LayerTables) -> IntArray:
    """One layer of each kind and the head, for a sample's shape: `[len(Row)]`.

    A packed row's are its own where they are known, and derived from the padded grid where not.
    """
    if sample.inputs:
        lengths = np.array(sample.inputs, np.int64), np.array(sample.targets, np.int64)
        found = packed_layer_costs(tables, *lengths)
        if found is None:
            return np.full(len(Row), ABSENT, np.int64)
        if sample.before:
            prefix = prefix_of_row(tables, lengths[0], np.array(sample.before, np.int64))
            found[list(ENCODER_ROWS)] += prefix
            found[[Row.ENCODER_ATTENTION_FORWARD, Row.ENCODER_ATTENTION_BACKWARD]] += prefix[:2]
        return found
    size, inputs, targets = (np.array([n], np.int64) for n in sample.shape)
    return np.asarray(tables.at_sizes(tables.at_lengths(inputs, targets), size)[0])


def _of_parts(parts: IntArray, predicted: IntArray, row: Row) -> tuple[Floats, Floats]:
    """Of the layers of a kind on the stage of each sample: their time, and that of attention which no MLP goes with."""
    mlp, whole, attention = parts.T
    alone = (attention - mlp) * predicted[:, _ATTENTION[row]].astype(float)
    return (whole + mlp) * predicted[:, row] + alone, alone


def _fit(
    samples: Sequence[PassSample],
    predicted: IntArray,
    layout: PipelineLayout,
    rows: Sequence[Row],
    measured_ns: Sequence[int],
) -> tuple[list[int], int, dict[Row, int]]:
    """For forwards or for backwards scales of the rows in thousandths, the offset per layer, and odds of attention."""
    measured = np.array(measured_ns, float)
    stage = np.array([sample.stage for sample in samples], np.int64)
    encoder, decoder = layout.encoder_parts[stage], layout.decoder_parts[stage]
    head = (stage == layout.virtual_stages - 1) * predicted[:, rows[2]].astype(float)
    by_kind = [_of_parts(parts, predicted, row) for parts, row in zip((encoder, decoder), rows, strict=False)]
    terms = np.stack([*(time for time, _ in by_kind), head], axis=1)
    usable = (measured > 0) & (terms.sum(axis=1) > 0) & (predicted[:, 0] != ABSENT)
    if not usable.any():
        raise CostModelError("no pass was measured by which the cost model could be corrected")
    alone = {kind: each[usable] for kind, (_, each) in enumerate(by_kind) if each[usable].any()}
    measured, terms, layers = measured[usable], terms[usable], ((encoder + decoder) @ [0.5, 1, 0.5])[usable]
    common = float(np.median(measured / terms.sum(axis=1)))
    offset_unit = float(np.median(measured / layers))
    both_ways = [sign * each * common for each in alone.values() for sign in (1, -1)]  # solutions are not negative
    columns = np.stack([*(terms * common).T, layers * offset_unit, *both_ways], axis=1) / measured[:, None]
    solved = _solved(columns)
    scales = [round(max(float(multiple), _LEAST_SCALE) * common * UNIT) for multiple in solved[:3]]
    odds = {}
    for at, kind in enumerate(alone):
        share = float(predicted[usable, _ATTENTION[rows[kind]]].sum() / predicted[usable, rows[kind]].sum())
        more = float(solved[4 + 2 * at] - solved[5 + 2 * at]) / max(float(solved[kind]), _LEAST_SCALE)
        odds[rows[kind]] = _odds(share, share * (1 + more))
    return scales, round(float(solved[3]) * offset_unit), odds


def _solved(columns: Floats) -> Floats:
    """Multiples of the columns by which every row sums to 1, held to 1 for scales and to 0 for what follows."""
    aims = np.array([1.0, 1.0, 1.0, *[0.0] * (columns.shape[1] - 3)])
    weights = np.array([1.0, 1.0, 1.0, _OFFSET_PULL, *[1.0] * (columns.shape[1] - 4)])
    pull = _PULL * np.sqrt(len(columns)) * np.diag(weights)
    aim, solved = pull @ aims, aims
    for _ in range(_ROBUST_STEPS):
        weight: Floats = 1 / np.sqrt(np.maximum(np.abs(columns @ solved - 1), 0.02) / 0.02)
        rows = np.concatenate([columns * weight[:, None], pull * float(weight.mean())])
        solved = nonnegative_least_squares(rows, np.concatenate([weight, aim * float(weight.mean())]))
    return solved


def _odds(share: float, found: float) -> int:
    """What makes one share of two parts another, in thousandths."""
    was, now = (min(max(each, 1 - _MOST_SHARE), _MOST_SHARE) for each in (share, found))
    return round(now * (1 - was) / (was * (1 - now)) * UNIT)
