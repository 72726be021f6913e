"""Measuring parts of layers: attention and MLP by themselves, weight gradients, and what a piece's prefix adds.

    attention                  under every mode, at two lengths (a decoder: at three) and in a few packed rows
    layer, and its MLP         the same for memory, and the MLP's time once: it takes what its positions do
    weight gradients           second halves of divided passes, the same under every mode, at three numbers of positions
    piece after m positions    attention to the prefix, too, under every mode at four lengths

A half is measured in the layer itself, without the modules of the other half, as on a stage that holds it alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import batched, count

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import (
    LAYER_KINDS,
    PEAK_UNIT,
    WEIGHT_UNIT,
    Division,
    LayerKind,
    Peak,
    Rates,
    WeightTime,
)
from megatron_dynapipe.core.units import Recompute, round_up
from megatron_dynapipe.costing.surface import nonnegative_least_squares
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.profiling.layers import Forward, Half, MeasuredModule, Point, only, run_backward
from megatron_dynapipe.megatron.profiling.measure import Scope, Values, at_once, measured_by_ranks
from megatron_dynapipe.megatron.profiling.packed import MeasuredRows, Row, of_row

POSITIONS = 1024
"""Positions of the micro-batches that are measured, about."""
POSITIONS_OF_PRODUCTS = {"cpu": 1024, "cuda": 16384}
"""Positions of the largest micro-batch whose weight gradients are measured: a GPU waits for launches of small ones."""
PARTS_OF_PRODUCTS = (2, 4)
"""Others have so many times fewer."""
SHARE = 4
"""Samples are as long as the longest, and by this factor shorter."""
LONG_FOR_PIECES = 512
"""Positions of a sample from which its pieces are measured."""
ROWS = {"encoder": 3, "decoder": 4, "expert": 3}
"""Packed rows of each kind in which attention is measured by itself."""
_PREFIXES = ((1, 2), (1, 7), (4, 1), (4, 4))
"""Eighths of the longest sample: a piece's, and the ones before it."""
_LARGEST = 2**24
_LINEAR = (1, 1, 0, 1)
"""The columns of `_terms` without attention's inside."""

Floats = npt.NDArray[np.float64]
Prefix = npt.NDArray[np.float64]
"""[forward, backward, stored, peak; once, times m, times m · n] in ns and bytes."""

Halves = tuple[Division, Floats]
"""How the costs of a kind of layer are divided, and `[4, 4]`, its MLP's `Values` by each of `_terms`."""
HalvesByMode = Mapping[tuple[LayerKind, Recompute], Halves]


def padded_halves(scope: Scope) -> HalvesByMode:
    """Halves of padded micro-batches of every kind under every mode; none where some do not fit the device."""
    halves: dict[tuple[LayerKind, Recompute], Halves] = {}
    for kind in LAYER_KINDS:
        if kind in scope.parts:
            by_mode = _halves_of_kind(scope, kind)
            if not by_mode:
                return {}
            halves |= by_mode
    return halves


def packed_halves(scope: Scope, measured: MeasuredRows, padded: HalvesByMode) -> HalvesByMode:
    """Halves of packed rows: attention is measured in some of those in which the layer was.

    Args:
        scope: what is measured, and how.
        measured: rows of every kind and mode, with what a layer takes.
        padded: `padded_halves`, of whose kinds and modes these are.
    """
    packed: dict[tuple[LayerKind, Recompute], Halves] = {}
    weights: dict[LayerKind, WeightTime | None] = {}
    for (kind, mode), (known, mlp) in padded.items():
        rows = measured.get((kind, mode), [])[: ROWS[kind]]
        part = scope.parts[kind]
        measures = [partial(_values, scope, of_row(part, row), mode, "attention") for row, _ in rows]
        attention = _all(scope, measures)
        if not rows or attention is None:
            return {}
        terms = _terms([row for row, _ in rows])
        layer = np.array([values.stored_bytes for _, values in rows], float)
        division = _divided(terms, layer, attention, mlp, known.parameters, packed=True)
        if kind not in weights:
            weights[kind] = weight_time(scope, kind, packed=True)
        packed[kind, mode] = (msgspec.structs.replace(division, weights=weights[kind]), mlp)
    return packed


def prefixes(scope: Scope) -> dict[Recompute, Prefix]:
    """Costs that attending to earlier positions adds to attention, by mode; a layer's peak rises by no more.

    Empty where samples cannot be cut, are short, or do not fit.
    """
    part = scope.parts["encoder"]
    longest = scope.within.input_length
    prepare = part.prepare_piece
    if prepare is None or longest < LONG_FOR_PIECES:
        return {}
    longest = min(longest, scope.most_positions)
    pieces = []
    for piece, before in _PREFIXES:
        pieces.append((round_up(longest * piece // 8), round_up(longest * before // 8)))
    without_prefix = sorted({(piece, 0) for piece, _ in pieces})
    points = [*pieces, *without_prefix]
    part = replace(part, prepare=prepare, alone=None)
    terms = np.array([(1, before, before * piece) for piece, before in pieces], float)
    by_mode: dict[Recompute, Prefix] = {}
    for mode in scope.modes:
        values = _all(scope, [partial(_values, scope, part, mode, "attention", point) for point in points])
        if values is None:
            return {}
        costs = dict(zip(points, values, strict=True))
        more = np.stack([costs[piece, before] - costs[piece, 0] for piece, before in pieces])
        by_mode[mode] = np.array([_solved(terms, column) for column in more.T])
    return by_mode


def _halves_of_kind(scope: Scope, kind: LayerKind) -> HalvesByMode:
    part = scope.parts[kind]
    points = _points(scope, kind)
    by_mode = dict[tuple[LayerKind, Recompute], Halves]()
    _, *lengths = zip(*points, strict=True)
    small = (1, *(round_up(max(column) // SHARE) for column in lengths))
    terms = _terms([_row(kind, point) for point in (*points, small)])
    weights = weight_time(scope, kind, packed=False)
    for mode in scope.modes:
        timed: dict[Half | None, Sequence[Point]] = {None: (), "attention": points, "mlp": points[-1:]}
        values = _all(scope, [
            partial(_values, scope, part, mode, half, point, timed=point in timed_points)
            for half, timed_points in timed.items()
            for point in (*points, small)
        ])  # fmt: skip
        if values is None:
            return {}
        layer, attention, mlp_values = np.split(values, 3)
        mlp = _of_mlp(terms, mlp_values)
        division = _divided(terms, layer[:, 2], attention, mlp, _parameters(part))
        by_mode[kind, mode] = msgspec.structs.replace(division, weights=weights), mlp
    return by_mode


def _points(scope: Scope, kind: LayerKind, positions: int = POSITIONS) -> list[Point]:
    """Micro-batches of about so many positions, of longest samples and of shorter ones."""
    inputs = scope.within.input_length
    targets = scope.within.target_length
    lengths: list[Point] = [(inputs,), (round_up(inputs // SHARE),)]
    if kind == "decoder":
        lengths = [(inputs, targets), (inputs, round_up(targets // SHARE)), (round_up(inputs // SHARE), targets)]
    most = min(positions, scope.most_positions)
    return [(min(max(most // sum(point), 1), scope.within.size), *point) for point in lengths]


def _values(
    scope: Scope, part: MeasuredModule, mode: Recompute, half: Half | None, point: Point = (), *, timed: bool = True
) -> Values | None:
    part.set_recompute(mode)
    with nullcontext() if half is None else only(half, part):
        return scope.measure(part, point, timed=timed)


def weight_time(scope: Scope, kind: LayerKind, *, packed: bool) -> WeightTime | None:
    """What weight gradients of a layer take; None where adapters alone have any, or these passes do not fit."""
    part = scope.parts[kind]
    if part.trained_parameters < part.parameters:
        return None
    most = POSITIONS_OF_PRODUCTS[scope.platform.device.type]
    points = _points(scope, kind, most)
    points += [_points(scope, kind, most // parts)[0] for parts in PARTS_OF_PRODUCTS]
    rows = [_row(kind, point) for point in points]
    parts = [of_row(part, row) if packed else part for row in rows]
    measures = [partial(_second_half, scope, *pair) for pair in zip(parts, points, strict=True)]
    values = _all(scope, measures)
    if values is None:
        return None
    took = np.maximum(values[:, 1], 1)
    terms = _terms(rows) * _LINEAR / took[:, None]  # relative errors count
    once, linear, _, memory = _solved(terms, np.ones(len(took))).tolist()
    return round(once), round(linear * WEIGHT_UNIT), round(memory * WEIGHT_UNIT)


def _second_half(scope: Scope, part: MeasuredModule, point: Point) -> Values | None:
    """`Values` of a divided pass, in which the backward is the second half alone, and all before it the forward."""
    halves = {id(chain.module): equip([chain.module]).halves for chain in part.from_most_layers}

    def divided(part: MeasuredModule) -> MeasuredModule:
        of_part = halves[id(part.module)]

        def prepare(point: Point) -> Forward:
            forward = part.prepare(point)
            passes = count()

            def first_half() -> tuple[int, int]:
                of_part.key = key = (next(passes), 0)
                run_backward(forward())
                of_part.key = None
                return key

            return first_half

        return replace(part, prepare=prepare, backward=of_part.add_weight_gradients)

    alone = None if part.alone is None else divided(part.alone)
    try:
        return _values(scope, replace(divided(part), alone=alone), Recompute.NONE, None, point)
    finally:
        for left in halves.values():
            left.clear()


def _all(scope: Scope, measures: Sequence[Callable[[], Values | None]]) -> Floats | None:
    """`[measures, 4]`; None where one does not fit."""
    results: list[Values | None] = []
    for turn, some in enumerate(batched(measures, at_once(shared=scope.shared))):
        results += measured_by_ranks(some, turn=turn, shared=scope.shared)
    return np.array(results, float) if all(results) else None


def _row(kind: LayerKind, point: Point) -> Row:
    size, inputs, *targets = point
    return (inputs,) * size, tuple(targets) * size if kind == "decoder" else ()


def _terms(rows: Sequence[Row]) -> Floats:
    """1, own positions, their pairs with keys, and positions of the encoder's output: `[rows, 4]`."""
    terms = []
    for row in rows:
        inputs, targets = (np.array(lengths, float) for lengths in row)
        if len(targets):
            pairs = (targets * (targets + inputs)).sum()
            terms.append((1.0, targets.sum(), pairs, inputs.sum()))
        else:
            terms.append((1.0, inputs.sum(), (inputs * inputs).sum(), 0.0))
    return np.array(terms)


def _divided(
    terms: Floats,
    layer: Floats,
    attention: Floats,
    mlp: Floats,
    parameters: tuple[int, int],
    *,
    packed: bool = False,
) -> Division:
    """How a layer's costs are divided, but for weight gradients.

    Args:
        terms: the terms of the rows that were measured.
        layer: bytes that a layer stores, `[rows]`.
        attention: `Values` of its attention, `[rows, 4]`; without times in rows that were measured for memory alone.
        mlp: its MLP's, as in `Halves`.
        parameters: attention's and the MLP's.
        packed: a packed row's peak is linear in its positions, as in its tables.
    """
    mlps = terms @ mlp.T
    timed = attention[:, 0] > 0
    forward = _rates(terms[timed], attention[timed, 0], mlps[timed, 0])
    backward = _rates(terms[timed], attention[timed, 1], mlps[timed, 1])
    stored = (
        _rates(terms, attention[:, 2], np.maximum(layer - attention[:, 2], 0)),
        _rates(terms, np.maximum(layer - mlps[:, 2], 0), mlps[:, 2]),
    )
    terms_of_peak = terms * _LINEAR if packed else terms
    peak = (_peak(_solved(terms_of_peak, attention[:, 3])), _peak(mlp[3]))
    return Division(forward=forward, backward=backward, stored=stored, peak=peak, parameters=parameters)


def _of_mlp(terms: Floats, values: Floats) -> Floats:
    """Times by own position, where they were measured; memory by all but attention's inside."""
    timed = values[:, 0] > 0
    forward, backward = values[timed, :2].sum(axis=0) / terms[timed, 1].sum()
    times = [(0.0, forward, 0.0, 0.0), (0.0, backward, 0.0, 0.0)]
    memory = [_solved(terms * _LINEAR, values[:, 2]), _solved(terms * _LINEAR, values[:, 3])]
    return np.array([*times, *memory])


def _peak(of_terms: Floats) -> Peak:
    once, *rates = of_terms.tolist()
    return Peak(math.ceil(once), *(math.ceil(rate * PEAK_UNIT) for rate in rates))


def _rates(terms: Floats, attention: Floats, mlp: Floats) -> Rates:
    linear, inner, memory = _solved(terms[:, 1:], attention)
    of_mlp = float(mlp.sum() / terms[:, 1].sum())
    return Rates(*_scaled(linear, inner, of_mlp, memory))


def _parameters(part: MeasuredModule) -> tuple[int, int]:
    with only("mlp", part):
        mlp = part.parameters
    attention, of_mlp = _scaled(part.parameters - mlp, mlp)
    return attention, of_mlp


def _scaled(*values: float) -> tuple[int, ...]:
    """Integers in the same proportions."""
    largest = max(*values, np.finfo(float).tiny)
    return tuple(round(value / largest * _LARGEST) for value in values)


def _solved(terms: Floats, values: Floats) -> Floats:
    """Non-negative coefficients of least squares, whatever the columns' scales."""
    scale = np.maximum(np.abs(terms).max(axis=0), np.finfo(float).tiny)
    unit = max(float(np.abs(values).max()), np.finfo(float).tiny)
    return np.asarray(nonnegative_least_squares(terms / scale, values / unit) / scale * unit)
