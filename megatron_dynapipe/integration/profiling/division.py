"""Measuring parts of layers: attention and MLP, weight gradients, and what a piece's prefix adds.

    layer                    attention + MLP                     at two lengths (a decoder: at three)
    layer without attention  MLP                                 the same
    layer, frozen            all but weight gradients            the same
    piece after m positions  attention to the prefix besides     at four lengths

All of it without recomputation: what that adds to a backward pass is the forward again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched, count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_dynapipe.cost.division import Division, Kind, Rates
from megatron_dynapipe.cost.surface import nonnegative_least_squares
from megatron_dynapipe.integration.profiling.layers import MeasuredModule, Point
from megatron_dynapipe.integration.profiling.measure import Scope, Values, at_once, measured_by_ranks
from megatron_dynapipe.units import Recompute, round_up

POSITIONS = 1024
"""Of the micro-batches that are measured, about."""
SHARE = 4
"""Samples are as long as the longest, and by this factor shorter."""
LONG_FOR_PIECES = 512
"""Positions of a sample from which its pieces are measured."""
_PREFIXES = ((1, 2), (1, 7), (4, 1), (4, 4))
"""Eighths of the longest sample: those of a piece, and those before it."""
_LARGEST = 2**24

Floats = npt.NDArray[np.float64]
Prefix = npt.NDArray[np.float64]
"""[forward, backward, stored, peak; once, times m, times m · n] in ns and bytes."""


class _Times(NamedTuple):
    """Of a layer at some points: `Values` of the layer, of its MLP, and of the frozen layer."""

    layer: Floats
    mlp: Floats
    frozen: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionProfiler:
    """Measures how layers' costs are divided, and what prefixes add.

    Attributes:
        scope: what is measured, and how.
    """

    scope: Scope

    def divisions(self, mode: Recompute, measured: Mapping[Kind, "_Times"]) -> dict[Kind, Division]:
        """The division of every kind of layer under a mode, from what `measure` gave."""
        return {kind: self._division(kind, mode, times) for kind, times in measured.items()}

    def measure(self) -> dict[Kind, "_Times"]:
        """Times of the layers' parts; none where they do not fit the device."""
        found: dict[Kind, _Times] = {}
        kinds: tuple[Kind, ...] = ("encoder", "decoder", "expert")
        for kind in kinds:
            if kind not in self.scope.parts:
                continue
            part, points = self.scope.parts[kind], self._points(kind)
            assert part.mlp is not None, "a layer"
            part.set_recompute(Recompute.NONE)
            asked = [partial(self.scope.measure, each, point) for each in (part, part.mlp) for point in points]
            asked += [partial(self._frozen, part, point) for point in points]
            values = self._all(asked)
            if all(values):
                found[kind] = _Times(*np.array(values, float).reshape(3, len(points), 4))
        return found

    def prefix(self) -> Prefix | None:
        """What attending to earlier positions adds; None where samples cannot be cut, are short, or do not fit."""
        part, longest = self.scope.parts["encoder"], self.scope.within.input_length
        prepare = part.prepare_piece
        if prepare is None or longest < LONG_FOR_PIECES:
            return None
        part.set_recompute(Recompute.NONE)
        longest = min(longest, self.scope.most_positions)
        pieces = [(round_up(longest * own // 8), round_up(longest * before // 8)) for own, before in _PREFIXES]
        points = [*pieces, *sorted({(own, 0) for own, _ in pieces})]
        part = replace(part, prepare=prepare, alone=None)
        values = self._all([partial(self.scope.measure, part, point) for point in points])
        if not all(values):
            return None
        found = {point: np.array(each, float) for point, each in zip(points, values, strict=True)}
        more, alone = (np.stack([found[own, m] for own, m in of]) for of in (pieces, [(own, 0) for own, _ in pieces]))
        terms = np.array([(1, before, before * own) for own, before in pieces], float)
        return np.array([_solved(terms, column) for column in (more - alone).T])

    def _points(self, kind: Kind) -> list[Point]:
        within = self.scope.within
        inputs, targets = within.input_length, within.target_length
        lengths: list[Point] = [(inputs,), (round_up(inputs // SHARE),)]
        if kind == "decoder":
            lengths = [(inputs, targets), (inputs, round_up(targets // SHARE)), (round_up(inputs // SHARE), targets)]
        most = min(POSITIONS, self.scope.most_positions)
        return [(min(max(most // sum(each), 1), within.size), *each) for each in lengths]

    def _frozen(self, part: MeasuredModule, point: Point) -> Values | None:
        with _frozen(part.module):
            return self.scope.measure(replace(part, alone=None), point)

    def _all(self, asked: Sequence[Callable[[], Values | None]]) -> list[Values | None]:
        turns, found = count(), []
        for some in batched(asked, at_once(shared=self.scope.shared)):
            found += measured_by_ranks(some, turn=next(turns), shared=self.scope.shared)
        return found

    def _division(self, kind: Kind, mode: Recompute, times: "_Times") -> Division:
        own, terms = self._terms(kind)
        attention = np.maximum(times.layer - times.mlp, 0)
        forward, stored = (_rates(terms, own, attention[:, of], times.mlp[:, of]) for of in (0, 2))
        backward = attention[:, 1], times.mlp[:, 1]
        if mode is Recompute.FULL:
            backward = backward[0] + attention[:, 0], backward[1] + times.mlp[:, 0]
        weights = float((times.layer[:, 1] - times.frozen[:, 1]).sum())
        core = terms[:, 1] * forward.inner
        linears = (terms @ [forward.linear, 0, forward.memory] + own * forward.mlp) / (
            terms @ [forward.linear, 0, forward.memory] + own * forward.mlp + core
        )
        part = self.scope.parts[kind]
        assert part.mlp is not None, "a layer"
        mlp = part.mlp.parameters
        of_attention, of_mlp = _scaled(part.parameters - mlp, mlp)
        return Division(
            forward=forward,
            backward=_rates(terms, own, *backward),
            stored=None if mode is Recompute.FULL else stored,
            parameters=(of_attention, of_mlp),
            weight_per_mille=max(round(1000 * weights / float((times.layer[:, 0] * linears).sum())), 0),
        )

    def _terms(self, kind: Kind) -> tuple[Floats, Floats]:
        """Own positions of the points, and what attention's linear, inner and memory rates are multiplied by there."""
        points = np.array(self._points(kind), float)
        size, encoder, own = points[:, 0], points[:, 1], points[:, -1]
        memory = encoder if kind == "decoder" else np.zeros_like(own)
        return size * own, size[:, None] * np.stack([own, own * (own + memory), memory], axis=1)


def _rates(terms: Floats, own: Floats, attention: Floats, mlp: Floats) -> Rates:
    linear, inner, memory = _solved(terms, attention)
    return Rates(*(_scaled(linear, inner, float(mlp.sum() / own.sum()), memory)))


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
