"""Fits of packed rows, against rows whose costs are known."""

import numpy as np
import pytest

from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import Shape, round_up
from megatron_dynapipe.costing.tabulate import LONGEST_ROW, RowSample, fit_part

WITHIN = Shape(size=8, input_length=512, target_length=96)
ENCODER = [(16,) * 16, (64,) * 4, (256,), (16,) * 64, (200, 56, 512), (512,) * 4]
DECODER = [((16,) * n, (8,) * n) for n in (4, 32)] + [
    ((64,) * 8, (8,) * 8),
    ((64,) * 8, (64,) * 8),
    ((512,), (96,)),
    ((512, 100, 7), (96, 9, 40)),
    ((256,) * 4, (24,) * 4),
]


def test_an_encoders_rows_are_split_into_positions_and_attention() -> None:
    def cost(row: tuple[int, ...]) -> float:
        return 3 + 0.5 * round_up(sum(row)) + sum(0.2 + 0.01 * s * s for s in row)

    linear, attention = fit_part([RowSample(row, (), cost(row)) for row in ENCODER], WITHIN)
    assert linear == {"8": pytest.approx(7, rel=1e-3), str(LONGEST_ROW): pytest.approx(3 + LONGEST_ROW / 2, rel=1e-3)}
    assert attention["1"] == pytest.approx(0.21, rel=1e-2)
    assert attention["512"] == pytest.approx(0.2 + 0.01 * 512**2, rel=1e-3)


def test_a_decoders_rows_are_split_by_inputs_and_targets() -> None:
    def cost(inputs: tuple[int, ...], targets: tuple[int, ...]) -> float:
        pairs = zip(inputs, targets, strict=True)
        return (
            5
            + 0.1 * round_up(sum(inputs))
            + round_up(sum(targets))
            + sum(0.3 + 0.02 * t * t + 0.01 * s * t for s, t in pairs)
        )

    linear, attention = fit_part([RowSample(*row, cost(*row)) for row in DECODER], WITHIN)
    assert set(linear) == {f"{p},{q}" for p in (8, LONGEST_ROW) for q in (8, LONGEST_ROW)}
    assert linear["8,8"] == pytest.approx(5 + 0.8 + 8, rel=1e-3)
    assert attention["512,96"] == pytest.approx(0.3 + 0.02 * 96**2 + 0.01 * 512 * 96, rel=1e-3)
    assert attention["1,96"] == pytest.approx(0.3 + 0.02 * 96**2 + 0.01 * 96, rel=1e-3)


def test_noise_is_averaged_and_nothing_turns_negative() -> None:
    draw = np.random.default_rng(0)
    rows = [RowSample(row, (), (2 + sum(row)) * draw.uniform(0.95, 1.05)) for row in ENCODER]
    linear, attention = fit_part(rows, WITHIN)
    predicted = linear[str(LONGEST_ROW)] / (LONGEST_ROW + 2)
    assert 0.85 < predicted < 1.1
    assert min(attention.values()) >= 0


def test_ends_of_a_fit() -> None:
    """What does not add up over samples is linear alone; what costs nothing is zero; too few rows are refused."""
    linear, attention = fit_part([RowSample(row, (), 4.0 * sum(row)) for row in ENCODER], WITHIN, attends=False)
    assert linear["8"] == pytest.approx(32) and attention == {}
    linear, attention = fit_part([RowSample(row, (), 0.0) for row in ENCODER], WITHIN)
    assert set(linear.values()) == set(attention.values()) == {0.0}
    with pytest.raises(CostModelError, match="expected at least 5 measured packed rows to fit costs to, got 2"):
        fit_part([RowSample((8,), (), 1.0)] * 2, WITHIN)
