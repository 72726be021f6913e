"""Fits to measured costs: physics by hand, holes, single points, monotonicity, the published profiles."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.costing.format import read_file
from megatron_dynapipe.costing.surface import cross_validate, fit_surface, monotone, nonnegative_least_squares
from megatron_dynapipe.tools.cost_files import held_out_errors
from tests.helpers.benchmark_data import A100_COSTS

SIZES, LENGTHS, TARGETS = (1, 2, 4, 8, 16), (16, 64, 256, 1024), (8, 32, 128)


def grid(*axes: tuple[int, ...]) -> np.ndarray:
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes)).astype(float)


def layer_ms(shapes: np.ndarray) -> np.ndarray:
    """A layer as physics has it: 1 ms to launch, then work per token and per pair of tokens."""
    b, q = shapes[:, 0], shapes[:, 1]
    return np.maximum(1.0, 2e-3 * b * q + 1e-6 * b * q * q)


def test_measured_points_come_back_though_they_lie_off_the_trend() -> None:
    shapes, costs = grid(SIZES, LENGTHS), layer_ms(grid(SIZES, LENGTHS))
    costs[shapes[:, 1] == 256] *= 1.15  # a kernel that is slow for one length
    surface = fit_surface(shapes, costs, times=True)
    assert np.abs(surface.at(shapes) / costs - 1).max() < 0.06


def test_one_point_makes_a_model_in_proportion_to_tokens() -> None:
    surface = fit_surface(np.array([[2.0, 100.0]]), np.array([4.0]), times=False)
    assert surface.at(np.array([[2.0, 100.0], [20.0, 100.0]])) == pytest.approx([4.0, 40.0], rel=0.01)


def test_a_few_odd_points_leave_the_trend_of_memory_alone() -> None:
    shapes = grid(SIZES, LENGTHS)
    memory = 5.0 * shapes[:, 0] * shapes[:, 1]
    odd = memory.copy()
    odd[-1] *= 0.4  # measured when the device was nearly full
    surface = fit_surface(shapes, odd, times=False)
    assert surface.trend(shapes) == pytest.approx(memory, rel=0.05)


@pytest.mark.parametrize("values", [[], [0.0], [float("nan")], [1.0, -1.0]])
def test_costs_that_cannot_be_fitted_are_refused(values: list[float]) -> None:
    shapes = np.array([[1.0, 8.0 * (i + 1)] for i in range(len(values))]).reshape(-1, 2)
    with pytest.raises(CostModelError, match="at least one cost, all above 0"):
        fit_surface(shapes, np.array(values), times=True)


def test_cross_validation_judges_every_point_by_a_fit_without_it() -> None:
    shapes = grid(SIZES, LENGTHS)
    costs = 3.0 * shapes[:, 0] * shapes[:, 1]
    assert cross_validate(shapes, costs, times=False).max() < 1e-6
    costs[7] *= 2
    errors = cross_validate(shapes, costs, times=False)
    assert errors[7] == pytest.approx(0.5, abs=0.05) and np.median(errors) < 0.01
    assert np.isnan(cross_validate(shapes[:1], costs[:1], times=False)).all()


def test_monotone_by_hand() -> None:
    assert monotone(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]


@given(st.lists(st.lists(st.floats(0.1, 100), min_size=3, max_size=3), min_size=2, max_size=5))
def test_monotone_never_falls_and_keeps_what_never_fell(rows: list[list[float]]) -> None:
    result = monotone(np.array(rows))
    assert (np.diff(result, axis=0) >= 0).all() and (np.diff(result, axis=1) >= 0).all()
    assert monotone(result) == pytest.approx(result)


@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_meets_the_optimality_conditions(seed: int) -> None:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(8, 4)), draw.normal(size=8)
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert gradient.max() < 1e-6 and np.abs(gradient[x > 0]).max(initial=0) < 1e-6


@pytest.mark.parametrize("path", A100_COSTS.values(), ids=A100_COSTS)
def test_a_quarter_of_a_published_profile_predicts_its_times(path: Path) -> None:
    file, _ = read_file(path)
    errors = held_out_errors(file, keep=0.25, seed=11)
    assert errors["time_ms"].median <= 0.04 and errors["time_ms"].p90 <= 0.10
    assert errors["stored_activation_mb"].median <= 0.04 and errors["stored_activation_mb"].p90 <= 0.10
    assert errors["peak_activation_mb"].median <= 0.04
