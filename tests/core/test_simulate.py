from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Forward
from megatron_dynapipe.core.native import core
from megatron_dynapipe.core.orders import gpipe, one_f_one_b
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.simulate import simulate
from tests.core.simulate_oracle import simulate_in_python
from tests.helpers.plans import NO_LIMIT, divided, random_problem


def even_problem(micro_batches: int, stages: int, *, transfer: int = 0, forward_only: bool = False) -> ScheduleProblem:
    """Forward 1, backward 2, stored 3, peak 5; stage s holds 10 · s bytes of model state."""
    shape = (micro_batches, stages)
    forward_transfer, backward_transfer = np.full(shape, transfer), np.full(shape, transfer)
    forward_transfer[:, -1] = backward_transfer[:, 0] = 0
    return ScheduleProblem(
        stages=stages,
        chunks=1,
        forward_ns=np.ones(shape, np.int64),
        backward_ns=np.full(shape, 2),
        weight_ns=np.ones(shape, np.int64),
        stored_bytes=np.full(shape, 3),
        peak_bytes=np.full(shape, 5),
        forward_transfer_ns=forward_transfer,
        backward_transfer_ns=backward_transfer,
        forward_message_bytes=np.zeros(shape, np.int64),
        backward_message_bytes=np.zeros(shape, np.int64),
        model_state_bytes=np.arange(stages) * 10,
        memory_limit_bytes=NO_LIMIT,
        forward_only=forward_only,
    )


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (1, 4), (4, 4), (8, 3)])
def test_an_even_1f1b_takes_the_textbook_time(micro_batches, stages):
    problem = even_problem(micro_batches, stages)
    run = simulate(problem, one_f_one_b(problem))
    assert run.makespan_ns == (micro_batches + stages - 1) * 3
    assert run.busy_ns == (micro_batches * 3,) * stages
    assert {run.makespan_ns - busy for busy in run.busy_ns} == {(stages - 1) * 3}


def test_memory_is_held_from_forward_to_backward():
    problem = even_problem(4, 2)
    # In flight: 4 and 4 under GPipe, 2 and 1 under 1F1B; the last forward's peak is 2 above what it stores.
    assert simulate(problem, gpipe(problem)).peak_bytes == (3 * 4 + 2, 10 + 3 * 4 + 2)
    assert simulate(problem, one_f_one_b(problem)).peak_bytes == (3 * 2 + 2, 10 + 3 + 2)
    forward_only = even_problem(4, 2, forward_only=True)
    assert simulate(forward_only, gpipe(forward_only)).peak_bytes == (5, 15)


def test_an_order_that_stalls_is_refused_with_where_it_stands():
    order = ((Forward(0), Backward(0), Forward(1), Backward(1)), (Forward(0), Forward(1), Backward(0), Backward(1)))
    with pytest.raises(PlanningError, match="the pass order stalls: stage 0 at B0, stage 1 at F1"):
        simulate(even_problem(2, 2), order)
    with pytest.raises(PlanningError, match="the pass order stalls: stage 1 at F0"):
        simulate(even_problem(1, 2), ((), (Forward(0),)))
    with pytest.raises(PlanningError, match="the pass order stalls: stage 0 at BW0"):
        simulate(even_problem(1, 1), ((Forward(0), BackwardWeight(0), BackwardInput(0)),))


def strained(problem: ScheduleProblem) -> ScheduleProblem:
    """With messages that take longer than passes, and peaks far above what is stored."""
    uneven = 1 + np.arange(problem.micro_batches)[:, None] % 3
    return replace(
        problem,
        peak_bytes=problem.stored_bytes * uneven,
        forward_transfer_ns=problem.forward_transfer_ns * 15,
        backward_transfer_ns=problem.backward_transfer_ns * 15,
    )


problems = st.builds(
    random_problem,
    micro_batches=st.integers(0, 9),
    stages=st.integers(2, 5),
    chunks=st.integers(1, 3),
    forward_only=st.booleans(),
    peak_covers_backward=st.booleans(),
    seed=st.integers(0, 10**6),
).map(strained)


@given(
    problem=problems,
    schedule=st.sampled_from([gpipe, one_f_one_b]),
    seed=st.none() | st.integers(0, 99),
)
def test_the_core_simulates_by_the_rules(problem, schedule, seed):
    order = schedule(problem)
    order = order if seed is None else divided(order, seed)
    assert simulate(problem, order) == simulate_in_python(problem, order)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": lambda a: a["costs"][:5]}, "expected an array of every kind of costs"),
        ({"costs": lambda a: [c[:1] for c in a["costs"][:1]] + a["costs"][1:]}, "the same micro-batches"),
        ({"costs": lambda a: [c - 10**6 for c in a["costs"]]}, "costs from 0"),
        ({"order": lambda a: a["order"] + 10**6}, "passes of the micro-batches and chunks that there are"),
        ({"order": lambda a: a["order"] - 100}, "passes of the micro-batches and chunks that there are"),
        ({"order": lambda a: a["order"][:1]}, "passes of every stage"),
        ({"chunks": lambda a: 0}, "between 1 and 64 chunks"),
        ({"model_state": lambda a: a["model_state"] - 100}, "model state from 0"),
        ({"model_state": lambda a: a["model_state"][:0]}, "between 1 and 4096 stages"),
    ],
)
def test_the_native_boundary_refuses_what_does_not_fit(change, message):
    problem = random_problem(2, 2)
    arguments = {
        "costs": problem.cost_arrays,
        "chunks": 1,
        "model_state": problem.model_state_bytes,
        "forward_only": False,
        "order": np.array([[0, 4, 1, 5], [0, 1, 4, 5]]),
    }
    core.simulate(**arguments)
    with pytest.raises(ValueError, match=message):
        core.simulate(**(arguments | {name: make(arguments) for name, make in change.items()}))
