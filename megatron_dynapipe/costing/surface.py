"""Fitting one measured cost over micro-batch shapes: a physical trend, and what is left interpolated.

    cost(size, lengths) = trend · exp(residual)

The trend adds up what a layer does with non-negative rates: work per token, attention's quadratic work, a constant;
a time does not fall below a floor, the time that launching a layer takes however small the micro-batch. The residual
(of the logarithm) is kriged over the logarithms of the shape: near measured points their own values win, far from
them the trend does. All numbers that are tuned stand at the top.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import CostModelError

Floats = npt.NDArray[np.float64]

_FLOORS = (0.0, 0.5, 0.7, 0.85, 1.0, 1.1)
"""Candidates for a time's floor, in units of the least time measured."""
_SHARPNESS = (2.0, 4.0, 8.0)
"""Candidates for how suddenly work takes over from the floor: the exponent of their power mean."""
_NEWTON_STEPS = 8
_ROBUST_STEPS = 8

_RANGE = 3.0
"""Correlation length of residuals, in octaves of tokens."""
_LENGTH_WEIGHT = 0.5
"""Distance of one octave of length at the same number of tokens."""
_RESIDUAL_DEVIATION = 0.1
"""How far measurements typically lie from the trend."""
_FLOOR_NOISE = 0.05
"""Relative noise of a time at the least time measured; it falls as times grow."""
_TIME_NOISE = 0.01
_MEMORY_NOISE = 0.003

_FOLDS = 5
"""The parts of cross-validation."""
_TOLERANCE = 1e-10
"""The bound of least squares: gradients below it count as 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """A fitted cost. Shapes are rows (size, length) or (size, input length, target length).

    Attributes:
        rates: rates of the terms of `work_terms`, each at least 0.
        floor: what no cost falls below; 0 for memory.
        sharpness: exponent of the power mean of work and floor.
        points: [n, dimensions] coordinates of the measured shapes.
        weights: [n], of their correlations with a queried shape.
    """

    rates: Floats
    floor: float
    sharpness: float
    points: Floats
    weights: Floats

    def at(self, shapes: Floats) -> Floats:
        """Costs of `[n, dimensions]` shapes."""
        return np.asarray(self.trend(shapes) * np.exp(_correlation(coordinates(shapes), self.points) @ self.weights))

    def trend(self, shapes: Floats) -> Floats:
        """Costs by the physical trend alone."""
        return _power_mean(work_terms(shapes) @ self.rates, self.floor, self.sharpness)


def work_terms(shapes: Floats) -> Floats:
    """The work of a layer for each shape: `[n, terms]`.

    One length q: b·q, b·q², 1. Two lengths s and t, of a decoder layer attending to s positions: b·t, b·s, b·t²,
    b·s·t, 1.
    """
    b, one = shapes[:, 0], np.ones(len(shapes))
    if shapes.shape[1] == 2:
        q = shapes[:, 1]
        return np.stack([b * q, b * q * q, one], axis=1)
    s, t = shapes[:, 1], shapes[:, 2]
    return np.stack([b * t, b * s, b * t * t, b * s * t, one], axis=1)


def fit_surface(shapes: Floats, values: Floats, *, times: bool) -> Surface:
    """Fit a cost to measurements.

    Args:
        shapes: [n, 2 or 3] distinct shapes.
        values: [n] costs above 0.
        times: whether they are times, which have a floor and noise; memory has neither.

    Raises:
        CostModelError: there is no measurement, or one is not above 0.
    """
    if not len(values) or not (np.isfinite(values) & (values > 0)).all():
        raise CostModelError(f"a fit needs at least one cost, all above 0, got {values.tolist()[:5]}")
    terms = work_terms(shapes)
    if times:
        rates, floor, sharpness = _fit_with_floor(terms, values)
        noise = np.hypot(_TIME_NOISE, _FLOOR_NOISE * values.min() / values)
    else:
        rates, floor, sharpness = _fit_robustly(terms, values), 0.0, 1.0
        noise = np.full(len(values), _MEMORY_NOISE)
    residual = np.log(values / _power_mean(terms @ rates, floor, sharpness))
    points = coordinates(shapes)
    covariance = _RESIDUAL_DEVIATION**2 * _correlation(points, points) + np.diag(noise**2)
    weights = _RESIDUAL_DEVIATION**2 * np.linalg.solve(covariance, residual)
    return Surface(rates=rates, floor=floor, sharpness=sharpness, points=points, weights=weights)


def cross_validate(shapes: Floats, values: Floats, *, times: bool) -> Floats:
    """Relative error at every point, predicted by a fit to the folds that it is not in; NaN where all is one fold."""
    fold = np.arange(len(values)) % min(_FOLDS, len(values))
    errors = np.full(len(values), np.nan)
    for part in range(int(fold.max()) + 1):
        out = fold == part
        if not out.all():
            predicted = fit_surface(shapes[~out], values[~out], times=times).at(shapes[out])
            errors[out] = np.abs(predicted / values[out] - 1)
    return errors


def monotone(grid: Floats) -> Floats:
    """The grid made non-decreasing along every axis: the mean of its least upper and greatest lower such bounds."""
    upper, lower = grid, grid
    for axis in range(grid.ndim):
        upper = np.maximum.accumulate(upper, axis=axis)
        lower = np.flip(np.minimum.accumulate(np.flip(lower, axis), axis=axis), axis)
    return np.asarray((upper + lower) / 2)


def _fit_with_floor(terms: Floats, values: Floats) -> tuple[Floats, float, float]:
    """Rates, floor and sharpness of least median and mean error in the logarithm."""
    best: tuple[float, Floats, float, float] | None = None
    for share in _FLOORS:
        floor = share * float(values.min())
        for sharpness in _SHARPNESS if floor else _SHARPNESS[:1]:
            rates = _newton(terms, values, floor, sharpness)
            error = np.abs(np.log(_power_mean(terms @ rates, floor, sharpness) / values))
            score = float(np.median(error) + error.mean())
            if best is None or score < best[0] - 1e-9:  # ties go to the first, whatever the last bits
                best = score, rates, floor, sharpness
    assert best is not None
    return best[1:]


def _newton(terms: Floats, values: Floats, floor: float, sharpness: float) -> Floats:
    """Gauss–Newton on the relative error of the power mean; linear, and exact at once, without a floor."""
    rates = _positive(terms / values[:, None], np.ones(len(values)))
    for _ in range(_NEWTON_STEPS if floor else 0):
        work = terms @ rates
        mean = _power_mean(work, floor, sharpness)
        slope = (work / mean) ** (sharpness - 1)
        rates = _positive(slope[:, None] * terms / values[:, None], (values - mean + slope * work) / values)
    return rates


def _fit_robustly(terms: Floats, values: Floats) -> Floats:
    """Rates of least mean relative error: least squares, reweighted so that a few odd points count little."""
    scaled = terms / values[:, None]
    rates = _positive(scaled, np.ones(len(values)))
    for _ in range(_ROBUST_STEPS):
        weight = 1 / np.sqrt(np.maximum(np.abs(scaled @ rates - 1), 0.01))
        rates = _positive(scaled * weight[:, None], weight)
    return rates


def _positive(terms: Floats, target: Floats) -> Floats:
    """Non-negative least squares, never all zero: a cost is never nothing."""
    scale = np.maximum(terms.max(axis=0), np.finfo(float).tiny)
    rates = nonnegative_least_squares(terms / scale, target) / scale
    if not rates.any():
        rates[-1] = 1 / scale[-1]
    return np.asarray(rates)


def _power_mean(work: Floats, floor: float, sharpness: float) -> Floats:
    """(workᵖ + floorᵖ)^(1/p): the larger of the two, with a soft corner."""
    return np.asarray((work**sharpness + floor**sharpness) ** (1 / sharpness)) if floor else work


def coordinates(shapes: Floats) -> Floats:
    """A shape's coordinates, for distances: octaves of its tokens first, then of its lengths, which count for less."""
    b = shapes[:, 0]
    if shapes.shape[1] == 2:
        q = shapes[:, 1]
        return np.stack([np.log2(b * q), _LENGTH_WEIGHT * np.log2(q)], axis=1)
    s, t = shapes[:, 1], shapes[:, 2]
    return np.stack([np.log2(b * t), _LENGTH_WEIGHT * np.log2(s / t), _LENGTH_WEIGHT * np.log2(t)], axis=1)


def _correlation(a: Floats, b: Floats) -> Floats:
    return np.asarray(np.exp(-np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=-1)) / _RANGE))


def nonnegative_least_squares(a: Floats, b: Floats) -> Floats:
    """x ≥ 0 of least |a·x - b|, by Lawson and Hanson's active set method ("Solving Least Squares Problems", 1974).

    A coefficient at a time becomes positive, the one that helps most (the first of several that help alike), and the
    others are solved for; those that would turn negative stop at zero. For a handful of columns of like scale.

    Args:
        a: [rows, columns].
        b: [rows].
    """
    columns = a.shape[1]
    x, positive = np.zeros(columns), np.zeros(columns, bool)
    for _ in range(3 * columns):  # each step adds a column; it ends long before
        gradient = a.T @ (b - a @ x)
        gradient[positive] = -np.inf
        if gradient.max() <= _TOLERANCE * len(b):
            break
        positive[int(np.argmax(gradient > gradient.max() * (1 - 1e-9)))] = True
        x = _inner(a, b, x, positive)
    return x


def _inner(a: Floats, b: Floats, x: Floats, positive: npt.NDArray[np.bool_]) -> Floats:
    """Solve for the positive columns, walking back to the first that reaches zero until all stay positive."""
    while positive.any():
        solved = np.zeros(len(x))
        solved[positive] = np.linalg.lstsq(a[:, positive], b, rcond=None)[0]
        stopping = positive & (solved <= 0)
        if not stopping.any():
            return solved
        step = np.min(x[stopping] / np.maximum(x[stopping] - solved[stopping], np.finfo(float).tiny))
        x = np.where(positive, x + min(step, 1.0) * (solved - x), 0.0)
        positive &= x > _TOLERANCE * max(x.max(), np.finfo(float).tiny)
        x[~positive] = 0.0
    return x
