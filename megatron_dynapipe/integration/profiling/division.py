"""Measuring parts of layers: attention and MLP by themselves, weight gradients, and what a piece's prefix adds.

    layer, and its attention   under every mode, at two lengths (a decoder: at three) and in a few packed rows
    MLP                        under every mode, at one of these: it takes what its positions do, packed or not
    layer, frozen              all but weight gradients, which are the same under every mode
    piece after m positions    attention to the prefix besides, under every mode at four lengths

A half is measured in the layer itself, without the modules of the other half, as on a stage that holds it alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, count
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from megatron_dynapipe.cost.division import Division, Kind, OfHalves, Rates
from megatron_dynapipe.cost.surface import nonnegative_least_squares
from megatron_dynapipe.integration.profiling.layers import Half, MeasuredModule, Point, only
from megatron_dynapipe.integration.profiling.measure import Scope, Values, at_once, measured_by_ranks
from megatron_dynapipe.integration.profiling.packed import MeasuredRows, Row, of_row
from megatron_dynapipe.units import Recompute, round_up

POSITIONS = 1024
"""Of the micro-batches that are measured, about."""
SHARE = 4
"""Samples are as long as the longest, and by this factor shorter."""
LONG_FOR_PIECES = 512
"""Positions of a sample from which its pieces are measured."""
ROWS = {"encoder": 3, "decoder": 4, "expert": 3}
"""Packed rows of each kind in which attention is measured by itself."""
_PREFIXES = ((1, 2), (1, 7), (4, 1), (4, 4))
"""Eighths of the longest sample: those of a piece, and those before it."""
_LARGEST = 2**24

Floats = npt.NDArray[np.float64]
Prefix = npt.NDArray[np.float64]
"""[forward, backward, stored, peak; once, times m, times m · n] in ns and bytes."""


class Halves(NamedTuple):
    """A kind of layer under a mode: how its costs are divided, and `Values` of its MLP by position."""

    division: Division
    mlp: Floats


HalvesByMode = Mapping[tuple[Kind, Recompute], Halves]


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionProfiler:
    """Measures how layers' costs are divided, and what prefixes add.

    Attributes:
        scope: what is measured, and how.
    """

    scope: Scope

    def padded(self) -> HalvesByMode:
        """Halves of padded micro-batches under every mode; none of a kind of which some do not fit the device."""
        found: dict[tuple[Kind, Recompute], Halves] = {}
        kinds: tuple[Kind, ...] = ("encoder", "decoder", "expert")
        modes = list(dict.fromkeys((Recompute.NONE, *self.scope.modes)))
        for kind in kinds:
            if kind not in self.scope.parts:
                continue
            part, points = self.scope.parts[kind], self._points(kind)
            asked = [partial(self._frozen, part, point) for point in points]
            for mode in modes:
                asked += [
                    partial(self._values, part, mode, half, point) for half in (None, "attention") for point in points
                ]
                asked.append(partial(self._values, part, mode, "mlp", points[-1]))
            values = self._all(asked)
            if not all(values):
                continue
            measured = np.array(values, float)
            frozen, of_modes = measured[: len(points)], measured[len(points) :].reshape(len(modes), -1, 4)
            rows = [_row(kind, point) for point in points]
            per_mille = 0
            for mode, its in zip(modes, of_modes, strict=True):
                layer, attention, mlp = its[: len(points)], its[len(points) : -1], its[-1] / _terms(rows)[0][-1]
                forward, backward, stored, peak = _divided(rows, layer, attention, mlp)
                if mode is Recompute.NONE:
                    per_mille = _weight_per_mille(rows, layer, frozen, forward)
                division = Division(
                    forward=forward,
                    backward=backward,
                    stored=stored,
                    peak=peak,
                    parameters=_parameters(part),
                    weight_per_mille=per_mille,
                )
                found[kind, mode] = Halves(division, mlp)
        return found

    def packed(self, measured: MeasuredRows, padded: HalvesByMode) -> HalvesByMode:
        """Halves of packed rows: attention is measured in some of those in which the layer was.

        Args:
            measured: rows of every kind and mode, with what a layer takes.
            padded: what `padded` gave.
        """
        found: dict[tuple[Kind, Recompute], Halves] = {}
        for (kind, mode), halves in padded.items():
            rows = measured.get((kind, mode), [])[: ROWS[kind]]
            part = self.scope.parts[kind]
            values = self._all([partial(self._values, of_row(part, row), mode, "attention", ()) for row, _ in rows])
            if rows and all(values):
                layer = np.array([each for _, each in rows], float)
                of_rows = [row for row, _ in rows]
                forward, backward, stored, peak = _divided(
                    of_rows, layer, np.array(values, float), halves.mlp, packed=True
                )
                division = msgspec.structs.replace(
                    halves.division, forward=forward, backward=backward, stored=stored, peak=peak
                )
                found[kind, mode] = Halves(division, halves.mlp)
        return found

    def prefixes(self) -> dict[Recompute, Prefix]:
        """What attending to earlier positions adds to attention, by mode; a layer's peak rises by no more.

        Empty where samples cannot be cut, are short, or do not fit.
        """
        part, longest = self.scope.parts["encoder"], self.scope.within.input_length
        prepare = part.prepare_piece
        if prepare is None or longest < LONG_FOR_PIECES:
            return {}
        longest = min(longest, self.scope.most_positions)
        pieces = [(round_up(longest * own // 8), round_up(longest * before // 8)) for own, before in _PREFIXES]
        points = [*pieces, *sorted({(own, 0) for own, _ in pieces})]
        part = replace(part, prepare=prepare, alone=None)
        terms = np.array([(1, before, before * own) for own, before in pieces], float)
        prefixes: dict[Recompute, Prefix] = {}
        for mode in self.scope.modes:
            values = self._all([partial(self._values, part, mode, "attention", point) for point in points])
            if not all(values):
                return {}
            found = {point: np.array(each, float) for point, each in zip(points, values, strict=True)}
            more = np.stack([found[own, before] - found[own, 0] for own, before in pieces])
            prefixes[mode] = np.array([_solved(terms, column) for column in more.T])
        return prefixes

    def _points(self, kind: Kind) -> list[Point]:
        within = self.scope.within
        inputs, targets = within.input_length, within.target_length
        lengths: list[Point] = [(inputs,), (round_up(inputs // SHARE),)]
        if kind == "decoder":
            lengths = [(inputs, targets), (inputs, round_up(targets // SHARE)), (round_up(inputs // SHARE), targets)]
        most = min(POSITIONS, self.scope.most_positions)
        return [(min(max(most // sum(each), 1), within.size), *each) for each in lengths]

    def _values(self, part: MeasuredModule, mode: Recompute, half: Half | None, point: Point) -> Values | None:
        part.set_recompute(mode)
        with nullcontext() if half is None else only(half, part):
            return self.scope.measure(part, point)

    def _frozen(self, part: MeasuredModule, point: Point) -> Values | None:
        with _frozen(part.module):
            return self._values(replace(part, alone=None), Recompute.NONE, None, point)

    def _all(self, asked: Sequence[Callable[[], Values | None]]) -> list[Values | None]:
        turns, found = count(), []
        for some in batched(asked, at_once(shared=self.scope.shared)):
            found += measured_by_ranks(some, turn=next(turns), shared=self.scope.shared)
        return found


def _row(kind: Kind, point: Point) -> Row:
    """The samples of a padded micro-batch."""
    size, inputs, *targets = point
    return Row((inputs,) * size, tuple(targets) * size if kind == "decoder" else ())


def _terms(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Own positions of the rows, and what attention's linear, inner and memory rates are multiplied by there."""
    terms = []
    for row in rows:
        inputs, targets = np.array(row.inputs, float), np.array(row.targets, float)
        own, keys, memory = (targets, targets + inputs, inputs.sum()) if row.targets else (inputs, inputs, 0.0)
        terms.append((own.sum(), (own * keys).sum(), memory))
    found = np.array(terms)
    return found[:, 0], found


def _divided(
    rows: Sequence[Row], layer: Floats, attention: Floats, mlp: Floats, *, packed: bool = False
) -> tuple[Rates, Rates, OfHalves, OfHalves]:
    """How times of forwards and of backwards, stored bytes and peaks are divided.

    Args:
        rows: that were measured.
        layer: `[rows, 4]`, `Values` of a layer.
        attention: likewise, of its attention.
        mlp: likewise of its MLP, by position.
        packed: a packed row's peak is linear in its positions, as in its tables.
    """
    own, terms = _terms(rows)
    mlps = own[:, None] * mlp
    forward, backward = (_rates(terms, attention[:, at], own, mlps[:, at]) for at in (0, 1))
    peak_terms = terms * [1, 0, 1] if packed else terms
    stored, peak = (
        _of_halves(each, own, layer[:, at], attention[:, at], mlps[:, at]) for at, each in ((2, terms), (3, peak_terms))
    )
    return forward, backward, stored, peak


def _of_halves(terms: Floats, own: Floats, layer: Floats, attention: Floats, mlp: Floats) -> OfHalves:
    """Each half against what the layer takes besides: beside attention the least of that, so that it gets no less."""
    besides = own * max(float(((layer - attention) / own).min()), 0.0)
    return _rates(terms, attention, own, besides), _rates(terms, np.maximum(layer - mlp, 0), own, mlp)


def _rates(terms: Floats, attention: Floats, own: Floats, mlp: Floats) -> Rates:
    linear, inner, memory = _solved(terms, attention)
    return Rates(*(_scaled(linear, inner, float(mlp.sum() / own.sum()), memory)))


def _weight_per_mille(rows: Sequence[Row], layer: Floats, frozen: Floats, forward: Rates) -> int:
    """Weight gradients, in thousandths of the forward of all but attention's inside."""
    own, terms = _terms(rows)
    linears = terms @ [forward.linear, 0, forward.memory] + own * forward.mlp
    share = linears / (linears + terms[:, 1] * forward.inner)
    weights = float((layer[:, 1] - frozen[:, 1]).sum())
    return max(round(1000 * weights / float((layer[:, 0] * share).sum())), 0)


def _parameters(part: MeasuredModule) -> tuple[int, int]:
    with only("mlp", part):
        mlp = part.parameters
    attention, its_mlp = _scaled(part.parameters - mlp, mlp)
    return attention, its_mlp


def _scaled(*values: float) -> tuple[int, ...]:
    """Integers in the same proportions."""
    largest = max(*values, np.finfo(float).tiny)
    return tuple(round(value / largest * _LARGEST) for value in values)


def _solved(terms: Floats, values: Floats) -> Floats:
    """Non-negative coefficients of least squares, whatever the columns' scales."""
    scale = np.maximum(np.abs(terms).max(axis=0), np.finfo(float).tiny)
    unit = max(float(np.abs(values).max()), np.finfo(float).tiny)
    return np.asarray(nonnegative_least_squares(terms / scale, values / unit) / scale * unit)


@contextmanager
def _frozen(module: torch.nn.Module) -> Iterator[None]:
    """No gradients of parameters inside the block; those of norms and biases take little beside matrices'."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
