"""Interpolation on the grid of layer costs, to the integer."""

import numpy as np
import pytest

from megatron_dynapipe.cost import ABSENT, LayerState, LayerTables, Row
from megatron_dynapipe.cost.tables import LARGEST_COST, IntArray
from megatron_dynapipe.errors import CostModelError

STATE = LayerState(embedding_bytes=1, encoder_bytes=1)


def grid(values: IntArray, sizes: list[int], inputs: list[int], targets: list[int]) -> LayerTables:
    """The same values in every row."""
    return LayerTables(
        sizes=np.array(sizes),
        inputs=np.array(inputs),
        targets=np.array(targets),
        values=np.repeat(values[None], len(Row), axis=0),
        state=STATE,
    )


def cost(tables: LayerTables, size: int, input_length: int, target_length: int = 0) -> int:
    grid_values = tables.at_lengths(np.array([input_length]), np.array([target_length]))
    return int(tables.at_sizes(grid_values, np.array([size]))[0, 0])


PLANE = grid(np.array([[[10], [30]], [[20], [60]]]), [1, 3], [8, 24], [0])


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [
        (1, 8, 10),
        (3, 24, 60),
        (1, 16, 20),
        (2, 8, 15),
        (2, 16, 30),
        pytest.param(1, 0, 10, id="below the smallest length, its cost"),
        pytest.param(1, 32, ABSENT, id="above the longest"),
        pytest.param(4, 8, ABSENT, id="above the largest size"),
    ],
)
def test_between_grid_points(size: int, length: int, expected: int) -> None:
    assert cost(PLANE, size, length) == expected


@pytest.mark.parametrize(
    ("size", "length", "feasible"),
    [
        pytest.param(1, 24, True, id="on an edge that has both ends"),
        pytest.param(2, 8, True, id="on another edge"),
        pytest.param(3, 24, False, id="the absent point"),
        pytest.param(2, 16, False, id="inside its cell"),
        pytest.param(2, 24, False, id="on an edge that it ends"),
        pytest.param(1, 16, True, id="where it has no weight"),
    ],
)
def test_a_cell_with_an_absent_corner(size: int, length: int, feasible: bool) -> None:
    tables = grid(np.array([[[10], [30]], [[20], [ABSENT]]]), [1, 3], [8, 24], [0])
    assert (cost(tables, size, length) != ABSENT) == feasible


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": np.array([3, 1])}, "sizes must increase"),
        ({"inputs": np.array([8, 16, 24])}, "must have the shape"),
        ({"values": np.full((len(Row), 2, 2, 1), -2)}, "between 0 and"),
        ({"values": np.full((len(Row), 2, 2, 1), LARGEST_COST + 1)}, "between 0 and"),
        ({"of_stages": np.zeros((3, len(Row), 2, 1, 1))}, "values of a stage must have the shape"),
    ],
)
def test_refuses_what_is_not_a_grid(change: dict[str, IntArray], message: str) -> None:
    parts = {name: getattr(PLANE, name) for name in ("sizes", "inputs", "targets", "values", "state")}
    with pytest.raises(CostModelError, match=message):
        LayerTables(**(parts | change))
    values = PLANE.values.copy()
    values[Row.HEAD_FORWARD, 0, 0, 0] = ABSENT
    with pytest.raises(CostModelError, match="absent from all rows or from none"):
        LayerTables(**(parts | {"values": values}))
