"""How good a cost model file is, and how two differ."""

import numpy as np

from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.costing.check import TIMES, Errors, as_arrays, tables_of
from megatron_dynapipe.costing.format import CostFile
from megatron_dynapipe.costing.surface import Floats, fit_surface

FEWEST_KEPT = 4
"""A fit is never asked to predict a table from fewer points than this."""


def held_out_errors(file: CostFile, *, keep: float, seed: int) -> dict[str, Errors]:
    """Fit every table to a random share of its points and predict the others; errors by quantity.

    Args:
        file: the measurements.
        keep: share of each table's distinct points that is fitted, above 0 and below 1.
        seed: draws the choice.

    Raises:
        ConfigError: `keep` is out of range.
        CostModelError: no table has enough points to hold one back.
    """
    if not 0 < keep < 1:
        raise ConfigError(f"expected a share of points to keep between 0 and 1, got {keep}")
    random = np.random.default_rng(seed)
    errors: dict[str, list[Floats]] = {}
    for (_, quantity, _), points in tables_of(file).items():
        shapes, values = as_arrays(points)
        order = random.permutation(len(values))
        kept, left = np.split(order, [max(FEWEST_KEPT, round(keep * len(values)))])
        if len(left):
            predicted = fit_surface(shapes[kept], values[kept], times=quantity == TIMES).at(shapes[left])
            errors.setdefault(quantity, []).append(np.abs(predicted / values[left] - 1))
    if not errors:
        raise CostModelError(f"cost model {file.name}: no table has more than {FEWEST_KEPT} points to hold some back")
    return {quantity: Errors.of(np.concatenate(parts)) for quantity, parts in errors.items()}


def differences(first: CostFile, second: CostFile) -> list[dict[str, str | int | float]]:
    """How the measurements of two files differ, for every table that either has.

    Relative differences are of points that both have; where there are none, they are NaN.
    """
    a = tables_of(first)
    b = tables_of(second)
    rows: list[dict[str, str | int | float]] = []
    for place in sorted(a.keys() | b.keys()):
        one = a.get(place, {})
        other = b.get(place, {})
        shared = sorted(one.keys() & other.keys())
        relative = np.array([abs(other[point] / one[point] - 1) for point in shared if one[point] > 0])
        rows.append(
            dict(zip(("key", "quantity", "part"), place, strict=True))
            | {
                "median": float(np.median(relative)) if len(relative) else float("nan"),
                "largest": float(relative.max()) if len(relative) else float("nan"),
                "shared": len(shared),
                "only_first": len(one) - len(shared),
                "only_second": len(other) - len(shared),
            }
        )
    return rows
