"""Where to measure next, tables filled from measurements, and how a file is judged."""

import numpy as np
import pytest

from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import Recompute, Shape
from megatron_dynapipe.costing import ABSENT, Quantity, TableCostModel
from megatron_dynapipe.costing.adaptive import RefinedGrid
from megatron_dynapipe.costing.format import CostFile, encode_file
from megatron_dynapipe.costing.tabulate import fitted_entry, lengths_up_to

AXES = ((1, 2, 4, 8, 16), (8, 16, 32, 64, 128, 256))


def explore(grid: RefinedGrid, points: int, bend: int = 0) -> list[tuple[int, ...]]:
    """Measure where the grid says; lengths above `bend` cost three times what is expected."""
    chosen = []
    for _ in range(points):
        found = grid.next(longest_ms=1e9)
        if found is None:
            break
        b, q = found[0]
        cost = 1.0 + 0.01 * b * q * (3.0 if bend and q > bend else 1.0)
        grid.add(found[0], cost, 2 * cost)
        chosen.append(found[0])
    return chosen


def test_it_begins_at_the_ends_and_never_repeats_itself() -> None:
    chosen = explore(RefinedGrid(AXES, most_positions=10**6), 30)
    assert {(1, 8), (16, 8), (1, 256)} <= set(chosen[:4])
    assert len(chosen) == len(set(chosen)) == 30  # the whole grid, once


def test_it_measures_more_where_the_cost_bends() -> None:
    smooth, bent = (explore(RefinedGrid(AXES, most_positions=10**6), 16, bend=bend) for bend in (0, 64))
    assert sum(1 for _, q in bent if q == 256) > sum(1 for _, q in smooth if q == 256)


def test_what_is_too_large_too_long_or_out_of_memory_is_left_out() -> None:
    grid = RefinedGrid(AXES, most_positions=512)
    assert all(b * q <= 512 for b, q in explore(grid, 40))
    grid = RefinedGrid(AXES, most_positions=10**6)
    explore(grid, 6)
    found = grid.next(longest_ms=5.0)
    assert found is None or 3 * (1 + 0.01 * np.prod(found[0])) < 8
    grid.add_infeasible((4, 32))
    assert not any(b >= 4 and q >= 32 for b, q in explore(grid, 40))
    assert RefinedGrid(AXES, most_positions=1).next(longest_ms=1.0) is None


def test_tables_are_filled_from_measurements() -> None:
    assert (lengths_up_to(8), lengths_up_to(100)) == ([8], [8, 16, 24, 32, 48, 64, 96, 100])
    measured = {
        ("time_ms", "encoder.forward"): {(b, q): 0.1 * b * q for b in (1, 4) for q in (8, 64)},
        ("time_ms", "encoder.backward"): {(b, q): 0.2 * b * q for b in (1, 4) for q in (8, 64)},
        ("time_ms", "postprocess.forward"): {(1, 8): 1.0},
        ("time_ms", "postprocess.backward"): {(1, 8): 1.0},
        ("stored_activation_mb", "encoder"): {(1, 8): 8.0, (2, 64): 128.0},
        ("peak_activation_mb", "encoder"): {(1, 8): 16.0, (2, 64): 256.0},
    }
    entry = fitted_entry(
        measured, tensor_parallel=1, recompute=Recompute.NONE, model_state_mb={"embedding": 1.0, "encoder": 2.0},
        within=Shape(size=8, input_length=128), infeasible={"encoder": [(8, 96)]},
    )  # fmt: skip
    file = CostFile(name="n", source="s", device="d", units={}, model={}, keys={"tp1_none": entry})
    tables = TableCostModel.decode(encode_file(file)).tables(tensor_parallel=1, recompute=Recompute.NONE)
    at = tables.at_sizes(tables.at_lengths(np.array([32, 96, 128]), np.zeros(3, np.int64)), np.array([2, 4, 8]))
    assert at[0, 0, Quantity.FORWARD] == pytest.approx(6.4e6, rel=0.1)
    assert at[1, 0, Quantity.STORED] == pytest.approx(384e6, rel=0.05)  # beyond what was measured
    assert (at[2] == ABSENT).all()  # ran out of memory
    assert file.keys["tp1_none"].measured is not None
    with pytest.raises(CostModelError, match=r"nothing was measured of time_ms of encoder\.forward"):
        fitted_entry(
            measured | {("time_ms", "encoder.forward"): {}}, tensor_parallel=1, recompute=Recompute.NONE,
            model_state_mb={}, within=Shape(size=8, input_length=128), infeasible={},
        )  # fmt: skip
