"""How good a cost model file is: what its fits predict of what was measured, and how quiet the machine was."""

from dataclasses import dataclass

import numpy as np

from megatron_dynapipe.costing.format import CostFile, Points, read_points
from megatron_dynapipe.costing.surface import Floats, cross_validate

TIMES = "time_ms"
"""The quantity of a file's tables that is no memory."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: their median and their ninth decile."""

    median: float
    p90: float

    @classmethod
    def of(cls, relative: Floats) -> "Errors":
        """The errors of predictions, at least one."""
        return cls(float(np.median(relative)), float(np.quantile(relative, 0.9)))


def tables_of(file: CostFile) -> dict[tuple[str, str, str], Points]:
    """Every measured table of a file, by (key, quantity, part)."""
    return {
        (key, *place): points
        for key, entry in file.keys.items()
        for place, points in read_points(entry.evidence, entry.kinds, f"cost model {file.name}, key {key}").items()
    }


def validated_errors(file: CostFile) -> dict[str, Errors]:
    """Error bars of the fit to all points, by five-fold cross-validation; by quantity."""
    errors: dict[str, list[Floats]] = {}
    for (_, quantity, _), points in tables_of(file).items():
        relative = cross_validate(*as_arrays(points), times=quantity == TIMES)
        errors.setdefault(quantity, []).append(relative[np.isfinite(relative)])
    joined = {quantity: np.concatenate(parts) for quantity, parts in errors.items()}
    return {quantity: Errors.of(relative) for quantity, relative in joined.items() if len(relative)}


def as_arrays(points: Points) -> tuple[Floats, Floats]:
    """(shapes [n, dimensions], values [n]) in order of the shapes, without costs of 0: no ratio to them exists."""
    rows = sorted((point, value) for point, value in points.items() if value > 0)
    return np.array([point for point, _ in rows], float), np.array([value for _, value in rows], float)
