"""From measured points to the tables of a cost model file: fit, fill a grid, keep the measurements with it.

Costs of packed rows are fitted to a few measured rows: a part linear in a row's positions, and attention per sample.

    encoder, decoder-only   start + rate · positions    +   Σ ( each + pairs · sᵢ² )              samples of s positions
    decoder                 start + rates · positions   +   Σ ( each + pairs · tᵢ² + cross · sᵢ tᵢ )      and t targets

Their coefficients are not negative and have the least relative error. The linear part becomes the corners of a table,
attention a grid fine enough for its squares.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import Recompute, Shape, round_up
from megatron_dynapipe.costing.analytic import geometric
from megatron_dynapipe.costing.check import TIMES, as_arrays
from megatron_dynapipe.costing.document import Table
from megatron_dynapipe.costing.format import CostEntry, Points, Tables, to_table
from megatron_dynapipe.costing.surface import Floats, fit_surface, monotone, nonnegative_least_squares

_DIGITS = 5
"""Significant digits of a fitted cost: far below its error, and a smaller file."""
LONGEST_ROW = 2**20
"""Positions up to which the linear part is written down."""
FEWEST_ROWS = 5
"""Rows that a fit needs at least."""

_PACKED_DIGITS = 6

PartTables = tuple[dict[str, float], dict[str, float]]
"""(linear, attention) of a part, by positions as the cost model file has them."""


def grid_axes(part: str, within: Shape) -> list[Sequence[int]]:
    """Sizes and lengths at which a part's tables have a value.

    Args:
        part: "encoder", "decoder", "expert", "postprocess".
        within: the largest size and lengths of a micro-batch that a run may ask for.
    """
    inputs = lengths_up_to(within.input_length)
    targets = lengths_up_to(within.target_length) if within.target_length else inputs
    sizes = [int(n) for n in geometric(1, within.size, between=True)]
    if part == "decoder":
        return [sizes, inputs, targets]
    return [sizes, targets if part == "postprocess" else inputs]


def lengths_up_to(longest: int) -> list[int]:
    """8, 16, 24, 32, 48, 64, 96, … and the longest, in multiples of 8."""
    return sorted({n - n % 8 for n in map(int, geometric(8, longest, between=True))} | {longest})


def fitted_entry(
    measured: Mapping[tuple[str, str], Points],
    *,
    tensor_parallel: int,
    recompute: Recompute,
    model_state_mb: Mapping[str, float],
    within: Shape,
    infeasible: Mapping[str, Sequence[tuple[int, ...]]],
) -> CostEntry:
    """One key of a cost model file from what was measured for it.

    Args:
        measured: by (quantity, part) of the file's format.
        tensor_parallel: the key's.
        recompute: the key's.
        model_state_mb: parameter bytes of a layer, 2 bytes each.
        within: the largest size and lengths of the grid to fill.
        infeasible: by part kind ("encoder", …), points that ran out of memory; those at least as large are absent.

    Raises:
        CostModelError: a table has no points.
    """
    fitted: dict[str, dict[str, Table]] = {}
    evidence: dict[str, dict[str, Table]] = {}
    for (quantity, part), points in measured.items():
        kind = part.split(".")[0]
        if not points:
            raise CostModelError(f"nothing was measured of {quantity} of {part}")
        filled = _fill(points, quantity, grid_axes(kind, within), infeasible.get(kind, ()))
        fitted.setdefault(quantity, {})[part] = to_table(filled)
        evidence.setdefault(quantity, {})[part] = to_table(points)
    state = {kind: round(mb, 6) for kind, mb in model_state_mb.items()}
    return CostEntry(
        tp=tensor_parallel,
        recompute=recompute,
        model_state_mb=state,  # type: ignore[arg-type]  # literal keys
        measured=Tables(**evidence),
        **fitted,  # type: ignore[arg-type]  # the parts by name
    )


def _fill(
    points: Points, quantity: str, axes: Sequence[Sequence[int]], infeasible: Sequence[tuple[int, ...]]
) -> Points:
    """Fitted values at every point of the grid that is not known to be infeasible; never falling along an axis."""
    surface = fit_surface(*as_arrays(points), times=quantity == TIMES)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    shapes: Floats = grid.reshape(-1, len(axes)).astype(float)
    values = monotone(surface.at(shapes).reshape(grid.shape[:-1])).reshape(-1)
    fits = np.ones(len(shapes), bool)
    for limit in infeasible:
        fits &= ~(shapes >= np.array(limit)).all(axis=1)
    return {
        tuple(int(x) for x in shape): float(f"{value:.{_DIGITS}g}")
        for shape, value, feasible in zip(shapes, values, fits, strict=True)
        if feasible
    }


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
    coefficients = np.zeros(6 if decoder else 4)
    coefficients[: terms.shape[1]] = _solve(terms, values)
    linear, attention = coefficients[:fixed], coefficients[fixed:]

    def at(rates: npt.NDArray[np.float64], *factors: int) -> float:
        return float(f"{float(rates @ np.array(factors, float)):.{_PACKED_DIGITS}g}")

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
    """The terms that a row's coefficients are multiplied by: the linear part's first.

    Args:
        inputs: positions of the samples' inputs.
        targets: lengths of their targets; empty but for a decoder.
    """
    input_lengths, target_lengths = np.array(inputs, float), np.array(targets, float)
    count, length, target_length = len(inputs), round_up(sum(inputs)), round_up(sum(targets))
    if not targets:
        return 1.0, length, count, float((input_lengths**2).sum())
    return (
        1.0,
        length,
        target_length,
        count,
        float((target_lengths**2).sum()),
        float((input_lengths * target_lengths).sum()),
    )


def _solve(terms: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Non-negative coefficients of least relative error; zeros where nothing costs anything."""
    usable = values > 0
    if not usable.any():
        return np.zeros(terms.shape[1])
    relative = terms[usable] / values[usable, None]
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)
    return np.asarray(nonnegative_least_squares(relative / scale, np.ones(int(usable.sum()))) / scale)
