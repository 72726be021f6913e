"""Least squares with non-negative coefficients."""

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_TOLERANCE = 1e-10


def nonnegative_least_squares(a: _Floats, b: _Floats) -> _Floats:
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


def _inner(a: _Floats, b: _Floats, x: _Floats, positive: npt.NDArray[np.bool_]) -> _Floats:
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
