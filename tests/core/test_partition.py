"""The partition of an order is the best there is, improving an order costs nothing, and replicas share it evenly."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.costs import ATTENTION
from megatron_dynapipe.core.partition import candidate_orders
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.scheduling import assign, pipeline_time
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import CostTables, Network, PipelineLayout, Quantity, model_of_layers
from megatron_dynapipe.costing.links import links_between
from tests.core.partition_oracle import batch_problems, brute_force
from tests.helpers.examples import examples
from tests.helpers.stage_costs import GPT_KINDS, STATE, grid_values

Found = tuple[list[int], list[int], int, int]
"""Sizes, modes, warm-up and total of a partition, as the native core returns them."""


def as_given(problem: BatchProblem) -> IntArray:
    return np.arange(len(problem.inputs))


def found(problem: BatchProblem, orders: list[IntArray], *, improve: bool) -> tuple[list[int], list[Found]]:
    return problem.native.partition(orders=orders, improve=improve)


def sizes_of_run(everyday: int, full: int) -> pytest.MarkDecorator:
    """Examples of a test in the everyday suite, and in the full one."""
    return pytest.mark.parametrize("examples", [everyday, pytest.param(full, marks=pytest.mark.slow)])


def held(number: int, problems: st.SearchStrategy[BatchProblem], check: Callable[[BatchProblem], None]) -> None:
    """Check as many problems."""
    settings(max_examples=number)(given(problems)(check))()


@sizes_of_run(300, 3000)
def test_partition_equals_brute_force(examples: int) -> None:
    held(examples, batch_problems(most_samples=5), equals_brute_force)


def equals_brute_force(problem: BatchProblem) -> None:
    order, partitions = found(problem, [as_given(problem)], improve=False)
    assert order == as_given(problem).tolist()
    for option, (sizes, modes, warmup, total) in enumerate(partitions):
        assert (sizes and (sizes, modes, warmup, total)) == (brute_force(problem, option) or [])


@sizes_of_run(100, 1000)
def test_the_best_of_several_orders_is_partitioned(examples: int) -> None:
    held(examples, batch_problems(most_samples=6), takes_the_best_order)


def takes_the_best_order(problem: BatchProblem) -> None:
    orders = [as_given(problem), as_given(problem)[::-1].copy()]
    order, partitions = found(problem, orders, improve=False)
    alone = [found(problem, [each], improve=False)[1][-1] for each in orders]
    best = min((objective(problem, each) for each in alone if each[0]), default=None)
    assert sorted(order) == as_given(problem).tolist()
    assert (objective(problem, partitions[-1]) if partitions[-1][0] else None) == best


def objective(problem: BatchProblem, partition: Found) -> int:
    return partition[2] * problem.replicas + partition[3] * problem.layout.chunks


@sizes_of_run(100, 500)
def test_improving_an_order_never_costs_more(examples: int) -> None:
    held(examples, batch_problems(most_samples=16), improving_costs_no_more)


def improving_costs_no_more(problem: BatchProblem) -> None:
    """For the option that was improved last; the other options begin with another order."""
    one = replace(problem, in_flight=problem.in_flight[-1:])
    for order in candidate_orders(one.inputs, one.targets):
        before, after = (found(one, [order], improve=improve) for improve in (False, True))
        assert sorted(after[0]) == as_given(one).tolist()
        assert bool(before[1][0][0]) == bool(after[1][0][0])
        if before[1][0][0]:
            assert objective(one, after[1][0]) <= objective(one, before[1][0])


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


@settings(max_examples=examples(100))
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


def test_a_large_order_is_partitioned_block_by_block() -> None:
    """Pairs are best: 6 ns for two samples, 5 for one; of 20,001 one is left over."""
    samples, one = 20_001, np.array([8])
    values = grid_values(GPT_KINDS, {(ATTENTION, Quantity.FORWARD): [[[5]], [[6]]]}, 2, 1, 1)
    none = np.zeros(1, np.int64)
    tables = CostTables(kinds=GPT_KINDS, sizes=np.arange(1, 3), inputs=one, targets=none, values=values, state=STATE)
    inputs, targets = np.full(samples, 8), np.zeros(samples, np.int64)
    large = BatchProblem(
        inputs=inputs,
        targets=targets,
        input_positions=inputs,
        target_positions=targets,
        batch_layouts=(BatchLayout.PADDED,),
        modes=(tables,),
        layout=PipelineLayout.equal(model_of_layers(ModelFamily.GPT, 2), 2),
        model_state_bytes=np.zeros(2, np.int64),
        memory_limit_bytes=100,
        in_flight=np.array([[2, 1]]),
        replicas=1,
        links=links_between(Network(), virtual_stages=2, stages=2, ranks_per_stage=1),
        bytes_per_position=1,
        held_per_position=1,
    )
    (sizes, _, warmup, total), *_ = found(large, [as_given(large)], improve=True)[1]
    assert (warmup, total) == (6, 10_000 * 6 + 5)
    assert sorted(sizes) == [1] + [2] * 10_000
