"""Costs of packed rows from a few that were measured: a part linear in a row's positions, and attention of each sample.

    encoder, decoder-only   start + rate · positions    +   Σ ( each + pairs · sᵢ² )              samples of s positions
    decoder                 start + rates · positions   +   Σ ( each + pairs · tᵢ² + cross · sᵢ tᵢ )      and t targets

Coefficients are not negative, and least in relative error. The linear part becomes the corners of a table, attention a
grid fine enough for its squares.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.nnls import nonnegative_least_squares
from megatron_dynapipe.cost.tabulate import lengths_up_to
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import Shape, round_up

LONGEST_ROW = 2**20
"""Positions up to which the linear part is written down."""
FEWEST_ROWS = 5
"""Rows that a fit needs at least."""

_DIGITS = 6

PartTables = tuple[dict[str, float], dict[str, float]]
"""(linear, attention) of a part, by positions as the cost model file has them."""


class RowSample(NamedTuple):
    """One packed row that was measured: positions of its samples, and what it cost."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    """Empty but for a decoder."""
    value: float


def fit_part(rows: Sequence[RowSample], within: Shape, *, attends: bool = True) -> PartTables:
    """The tables of one part in one quantity.

    Args:
        rows: what was measured; a decoder's have targets.
        within: the longest samples that a run may have.
        attends: whether samples cost anything by themselves: the head's and peaks of memory do not add up over them.

    Raises:
        CostModelError: there are too few rows.
    """
    if len(rows) < FEWEST_ROWS:
        raise CostModelError(f"expected at least {FEWEST_ROWS} measured packed rows to fit costs to, got {len(rows)}")
    decoder = bool(rows[0].targets)
    terms = np.array([row_terms(row.inputs, row.targets) for row in rows])
    fixed = 3 if decoder else 2  # of the linear part
    if not attends:
        terms = terms[:, :fixed]
    values = np.array([row.value for row in rows])
    found = np.zeros(6 if decoder else 4)
    found[: terms.shape[1]] = _solve(terms, values)
    linear, attention = found[:fixed], found[fixed:]

    def at(rates: npt.NDArray[np.float64], *factors: int) -> float:
        return float(f"{float(rates @ np.array(factors, float)):.{_DIGITS}g}")

    ends = (8, LONGEST_ROW)
    if not decoder:
        grid = [1, *lengths_up_to(max(within.input_length, within.target_length))]
        return (
            {f"{p}": at(linear, 1, p) for p in ends},
            {f"{s}": at(attention, 1, s * s) for s in grid} if attends else {},
        )
    targets = [1, *lengths_up_to(within.target_length)]
    return (
        {f"{p},{q}": at(linear, 1, p, q) for p in ends for q in ends},
        {f"{s},{t}": at(attention, 1, t * t, s * t) for s in (1, within.input_length) for t in targets}
        if attends
        else {},
    )


def row_terms(inputs: Sequence[int], targets: Sequence[int]) -> tuple[float, ...]:
    """What the coefficients of a row are multiplied by: those of the linear part first.

    Args:
        inputs: positions of the samples' inputs.
        targets: of their targets; empty but for a decoder.
    """
    given, wanted = np.array(inputs, float), np.array(targets, float)
    count, length, target_length = len(inputs), round_up(sum(inputs)), round_up(sum(targets))
    if not targets:
        return 1.0, length, count, float((given**2).sum())
    return 1.0, length, target_length, count, float((wanted**2).sum()), float((given * wanted).sum())


def _solve(terms: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Non-negative coefficients of least relative error; zeros where nothing costs anything."""
    usable = values > 0
    if not usable.any():
        return np.zeros(terms.shape[1])
    relative = terms[usable] / values[usable, None]
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)
    return np.asarray(nonnegative_least_squares(relative / scale, np.ones(int(usable.sum()))) / scale)
