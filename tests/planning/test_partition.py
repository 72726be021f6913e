"""The partition is optimal, and the compiled core and its Python twin find the same cut."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.planning.intervals import UNREACHABLE, CutProblem, Intervals, intervals
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.ordering import sweeps
from megatron_dynapipe.planning.partition import OrderedCuts, cut_in_python, cut_intervals, cut_natively
from megatron_dynapipe.planning.problem import IntArray
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


def as_given(problem: CutProblem) -> list[IntArray]:
    return [np.arange(len(problem.inputs))]


def sizes_of_run(everyday: int, full: int) -> pytest.MarkDecorator:
    """Examples of a test in the everyday suite, and in the full one."""
    return pytest.mark.parametrize("examples", [everyday, pytest.param(full, marks=pytest.mark.slow)])


def held(examples: int, problems: st.SearchStrategy[CutProblem], check: Callable[[CutProblem], None]) -> None:
    """Check as many problems."""
    settings(max_examples=examples, deadline=None)(given(problems)(check))()


@sizes_of_run(300, 3000)
def test_python_equals_brute_force(examples: int) -> None:
    held(examples, cut_problems(most_samples=5), equals_brute_force)


def equals_brute_force(problem: CutProblem) -> None:
    for option, found in enumerate(cut_in_python(problem, as_given(problem), refine=False).cuts):
        best = brute_force(intervals(problem, option), problem.replicas, problem.layout.chunks)
        assert (None if found is None else found.objective(problem.replicas, problem.layout.chunks)) == best


def assert_equal(ours: OrderedCuts, twin: OrderedCuts) -> None:
    assert ours.order.tolist() == twin.order.tolist()
    for mine, its in zip(ours.cuts, twin.cuts, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            assert (mine.fill_ns, mine.total_ns) == (its.fill_ns, its.total_ns)
            assert mine.sizes.tolist() == its.sizes.tolist()
            assert mine.modes.tolist() == its.modes.tolist()


@needs_native
@sizes_of_run(200, 1000)
def test_native_equals_python(examples: int) -> None:
    held(examples, cut_problems(), native_equals_python)


def native_equals_python(problem: CutProblem) -> None:
    orders = as_given(problem)
    ours = cut_natively(problem, orders, NATIVE, refine=False)
    assert_equal(ours, cut_in_python(problem, orders, refine=False))


@needs_native
@sizes_of_run(60, 300)
def test_native_equals_python_where_orders_are_bettered(examples: int) -> None:
    held(examples, cut_problems(most_samples=16), native_equals_python_where_orders_are_bettered)


def native_equals_python_where_orders_are_bettered(problem: CutProblem) -> None:
    orders = sweeps(problem.inputs, problem.targets)
    ours = cut_natively(problem, orders, NATIVE, refine=True)
    assert_equal(ours, cut_in_python(problem, orders, refine=True))


@sizes_of_run(40, 200)
def test_refining_never_costs_more(examples: int) -> None:
    held(examples, cut_problems(most_samples=16), refining_costs_no_more)


def refining_costs_no_more(problem: CutProblem) -> None:
    """For the option that was refined last."""
    one = replace(problem, in_flight=problem.in_flight[-1:])
    before, after = (cut_in_python(one, as_given(one), refine=refine).cuts[0] for refine in (False, True))
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        chunks = problem.layout.chunks
        assert after.objective(problem.replicas, chunks) <= before.objective(problem.replicas, chunks)
