"""From measured points to the tables of a cost model file: fit, fill a grid, keep what was measured beside it."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_dynapipe.cost.analytic import geometric
from megatron_dynapipe.cost.check import as_arrays, kind_of
from megatron_dynapipe.cost.format import CostEntry, Points, Table, Tables, to_table
from megatron_dynapipe.cost.surface import Floats, fit_surface, monotone
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import Recompute, Shape

_DIGITS = 5
"""Significant digits of a fitted cost: far below its error, and a smaller file."""


def grid_axes(part: str, within: Shape) -> list[Sequence[int]]:
    """Sizes and lengths at which a part's tables have a value.

    Args:
        part: "encoder", "decoder", "postprocess", "embedding".
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
        tensor_parallel: of the key.
        recompute: of the key.
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
    surface = fit_surface(*as_arrays(points), kind_of(quantity))
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
