"""The partition is optimal, and the compiled core and its Python twin find the same cut."""

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_dynapipe.planning.intervals import UNREACHABLE, CutProblem, Intervals, intervals
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.partition import cut_in_python, cut_intervals, cut_natively
from tests.planning.cut_problems import brute_force, cut_problems

needs_native = pytest.mark.skipif(NATIVE is None, reason="the native core is not built")


def costs(time: list[list[int]], fill: list[list[int]]) -> Intervals:
    """Costs under one mode; -1 is infeasible."""
    arrays = [np.array(rows, np.int64)[:, :, None] for rows in (time, fill)]
    arrays = [np.where(array < 0, UNREACHABLE, array) for array in arrays]
    return Intervals(time_ns=arrays[0], fill_ns=arrays[1])


@pytest.mark.parametrize(
    ("time", "fill", "replicas", "expected"),
    [
        pytest.param([[5]], [[7]], 1, ([1], 7, 5), id="one sample"),
        pytest.param([[5, 6], [5, -1]], [[5, 6], [5, -1]], 1, ([2], 6, 6), id="together is cheaper"),
        pytest.param([[5, 10], [5, -1]], [[5, 10], [5, -1]], 1, ([1, 1], 5, 10), id="a long micro-batch fills slowly"),
        pytest.param([[5, 8], [5, -1]], [[5, 8], [5, -1]], 1, ([1, 1], 5, 10), id="of ties, the smallest fill"),
        pytest.param(
            [[5, 9], [5, -1]], [[0, 2], [0, -1]], 4, ([1, 1], 0, 10), id="replicas share the total, not the fill"
        ),
        pytest.param([[5, -1], [5, -1]], [[1, -1], [1, -1]], 1, ([1, 1], 1, 10), id="memory allows one each"),
    ],
)
def test_cut(time: list[list[int]], fill: list[list[int]], replicas: int, expected: tuple[list[int], int, int]) -> None:
    found = cut_intervals(costs(time, fill), replicas=replicas, chunks=1)
    assert found is not None
    assert (found.sizes.tolist(), found.fill_ns, found.total_ns) == expected


def test_no_cut_fits() -> None:
    assert cut_intervals(costs([[5, 6], [-1, -1]], [[5, -1], [-1, -1]]), replicas=1, chunks=1) is None


@settings(max_examples=400, deadline=None)
@given(cut_problems(most_samples=6))
def test_python_equals_brute_force(problem: CutProblem) -> None:
    for option, found in enumerate(cut_in_python(problem)):
        best = brute_force(intervals(problem, option), problem.replicas, problem.layout.chunks)
        assert (None if found is None else found.objective(problem.replicas, problem.layout.chunks)) == best


@needs_native
@settings(max_examples=2000, deadline=None)
@given(cut_problems())
def test_native_equals_python(problem: CutProblem) -> None:
    for ours, twin in zip(cut_natively(problem, NATIVE), cut_in_python(problem), strict=True):
        assert (ours is None) == (twin is None)
        if ours is not None and twin is not None:
            assert (ours.fill_ns, ours.total_ns) == (twin.fill_ns, twin.total_ns)
            assert ours.sizes.tolist() == twin.sizes.tolist()
            assert ours.modes.tolist() == twin.modes.tolist()
