"""Choosing where to measure next: few points where a cost is smooth, more where it bends."""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_dynapipe.costing.surface import Floats, Surface, coordinates, cross_validate, fit_surface

Point = tuple[int, ...]

_UNKNOWN_ERROR = 0.3
"""Error assumed of predictions while there are too few points to tell."""
_LEAST_ERROR = 0.03
_FEWEST_TO_VALIDATE = 6
_VALIDATE_AGAIN = 1.3
"""Growth of the number of points after which errors are estimated again."""


class RefinedGrid:
    """The points of one surface (forward and backward of a part under one recompute mode).

    Candidates are the points of a grid; a measured point makes those near it less worth measuring, and an error of
    prediction there makes them more so. A point that ran out of memory rules out all that are at least as large.

    Args:
        axes: sizes and lengths that may be measured, increasing.
        most_positions: points of more positions (size × all lengths) are left out.
    """

    def __init__(self, axes: Sequence[Sequence[int]], *, most_positions: int) -> None:
        self.measured: dict[Point, tuple[float, float]] = {}
        self.infeasible: list[Point] = []
        self._candidates = [point for point in itertools.product(*axes) if point[0] * sum(point[1:]) <= most_positions]
        self._start = _first_points(self._candidates)
        self._next: tuple[float, tuple[Point, float] | None] | None = None
        self._errors: Floats = np.zeros(0)
        self._validated = 0

    def add(self, point: Point, forward_ms: float, backward_ms: float) -> None:
        """A measured point."""
        self.measured[point] = forward_ms, backward_ms
        self._next = None

    def add_infeasible(self, point: Point) -> None:
        """A point that ran out of memory."""
        self.infeasible.append(point)
        self._next = None

    @property
    def lacks_first(self) -> bool:
        """Whether one of the points to begin with is neither measured nor ruled out."""
        return any(point not in self.measured and not self._is_infeasible(point) for point in self._start)

    def next(self, *, longest_ms: float) -> tuple[Point, float] | None:
        """The point most worth measuring, and how much: expected error there times distance from what is measured.

        Args:
            longest_ms: points whose forward and backward are expected to take longer are left out.

        Returns:
            None when nothing is left.
        """
        if self._next is None or self._next[0] != longest_ms:
            self._next = longest_ms, self._choose(longest_ms)
        return self._next[1]

    def _choose(self, longest_ms: float) -> tuple[Point, float] | None:
        for point in self._start:
            if point not in self.measured and not self._is_infeasible(point):
                return point, float("inf")
        if not self.measured or longest_ms <= 0:
            return None
        forward, backward, shapes = self._fitted()
        left = [p for p in self._candidates if p not in self.measured and not self._is_infeasible(p)]
        if not left:
            return None
        queries = np.array(left, float)
        queries = queries[forward.at(queries) + backward.at(queries) <= longest_ms]
        if not len(queries):
            return None
        gaps = coordinates(queries)[:, None] - coordinates(shapes)[None]
        distance = np.sqrt((gaps**2).sum(axis=-1))
        nearest = distance.argmin(axis=1)
        score = distance.min(axis=1) * (_LEAST_ERROR + self._errors[nearest])
        best = int(np.argmax(score > score.max() * (1 - 1e-9)))
        return tuple(int(x) for x in queries[best]), float(score[best])

    def _fitted(self) -> tuple[Surface, Surface, Floats]:
        shapes = np.array(list(self.measured), float)
        costs = np.array(list(self.measured.values()))
        forward, backward = (fit_surface(shapes, costs[:, way], times=True) for way in (0, 1))
        if len(shapes) < _FEWEST_TO_VALIDATE:
            self._errors = np.full(len(shapes), _UNKNOWN_ERROR)
        elif len(shapes) >= _VALIDATE_AGAIN * self._validated:  # it costs several fits
            self._validated = len(shapes)
            self._errors = np.maximum(*(cross_validate(shapes, costs[:, way], times=True) for way in (0, 1)))
        unknown = np.full(len(shapes) - len(self._errors), np.median(self._errors))
        self._errors = np.concatenate([self._errors, unknown])
        return forward, backward, shapes

    def _is_infeasible(self, point: Point) -> bool:
        return any(all(x >= y for x, y in zip(point, limit, strict=True)) for limit in self.infeasible)


def _first_points(candidates: Sequence[Point]) -> list[Point]:
    """The points to begin with: the smallest, the ends of every axis from there, and the middle; without repetition."""
    if not candidates:
        return []
    origin = candidates[0]

    def far(axis: int, share: float) -> Point:
        on_axis = [p for p in candidates if all(p[d] == origin[d] for d in range(len(p)) if d != axis)]
        return on_axis[round(share * (len(on_axis) - 1))]

    shares: Sequence[float] = (1.0, 0.5)
    ends = [far(axis, share) for share in shares for axis in range(len(origin))]
    middle = sorted(candidates, key=lambda point: float(np.prod(point)))[len(candidates) // 2]
    return list(dict.fromkeys([origin, *ends, middle]))
