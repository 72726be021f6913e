"""Micro-batches assigned to replicas: all of them, none left empty, the slowest replica fast."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.planning.balance import assign, pipeline_time


@pytest.mark.parametrize(
    ("times", "replicas", "expected"),
    [
        pytest.param([[4], [3], [3], [2]], 2, [[0, 3], [1, 2]], id="sums are even"),
        pytest.param([[5], [1], [1], [1]], 3, [[0], [1, 3], [2]], id="numbers may differ"),
        pytest.param([[2, 8], [2, 8], [8, 2], [8, 2]], 2, [[0, 2], [1, 3]], id="stages are even, not only sums"),
        pytest.param([[5], [0]], 2, [[0], [1]], id="a replica without work still gets one"),
        pytest.param([[5, 1], [7, 1]], 1, [[0, 1]], id="one replica"),
    ],
)
def test_assign(times: list[list[int]], replicas: int, expected: list[list[int]]) -> None:
    assert [rows.tolist() for rows in assign(np.array(times, np.int64), replicas)] == expected


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda r: st.lists(st.lists(st.integers(0, 50), min_size=r, max_size=r), min_size=1, max_size=7)
    ),
    st.integers(1, 3),
)
def test_assigns_everything_and_comes_near_the_best(given: list[list[int]], replicas: int) -> None:
    times = np.array(given, np.int64)
    assigned = assign(times, replicas)
    assert sorted(np.concatenate(assigned).tolist()) == list(range(len(times)))
    assert min(len(rows) for rows in assigned) >= (1 if len(times) >= replicas else 0)
    slowest = max(pipeline_time(times[rows]) for rows in assigned)
    owners = (np.array(owner) for owner in product(range(replicas), repeat=len(times)))
    best = min(max(pipeline_time(times[owner == r]) for r in range(replicas)) for owner in owners)
    assert slowest <= 1.5 * best
