"""Messages are planned memory: what lists hold of them, what orders of passes are counted with, plans within it."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Pass, SendStart
from megatron_dynapipe.core.memory import message_elements, peak_bytes
from megatron_dynapipe.core.native import fast_verify
from megatron_dynapipe.core.network import TransferRules
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import batch, planner
from tests.helpers.lists import parse_instruction
from tests.helpers.plans import make_plan, random_problem

MIDDLE = """
LOAD0 RECV_F0<0[2] WAIT_RECV_F0<0 RECV_F1<0[3] F0 SEND_F0>2[5] FREE_DATA0
LOAD1 WAIT_RECV_F1<0 F1 SEND_F1>2[7] FREE_DATA1 RECV_B0<2[5]
WAIT_RECV_B0<2 WAIT_SEND_F0>2 FREE_OUTPUT0 RECV_B1<2[7] B0 SEND_B0>0[2] FREE_INPUT0 FREE_OUTPUT_GRAD0
WAIT_RECV_B1<2 WAIT_SEND_F1>2 FREE_OUTPUT1 B1
"""


def test_messages_of_a_list() -> None:
    """Two inputs at once of at most 3; up to two gradients and two sends of at most 7; kept inputs are not counted."""
    lists = [parse_instruction(word) for word in MIDDLE.split()]
    assert message_elements(lists, forward_only=False) == [6, 6 + 7 - 2, 6 + 14 + 14 - 3, 6 + 14 + 14]


@given(
    micro_batches=st.integers(1, 9),
    stages=st.integers(1, 5),
    chunks=st.integers(1, 3),
    method=st.sampled_from(["1f1b", "gpipe", "adaptive"]),
    forward_only=st.booleans(),
    halves=st.booleans(),
    receive_ahead=st.sampled_from([None, 0]),
    family=st.sampled_from(ModelFamily),
    seed=st.integers(0, 99),
)
def test_orders_are_counted_with_the_messages_of_their_lists(
    micro_batches, stages, chunks, method, forward_only, halves, receive_ahead, family, seed
):
    chunks = chunks if stages > 1 else 1
    changes = {"chunks": chunks, "method": method, "forward_only": forward_only, "halves": halves and not forward_only}
    plan = make_plan((micro_batches,), stages, family=family, seed=seed, receive_ahead=receive_ahead, **changes)
    (replica,) = plan.replicas
    problem = random_problem(micro_batches, stages, chunks=chunks, forward_only=forward_only, seed=seed)
    sent = {True: np.zeros_like(problem.forward_ns), False: np.zeros_like(problem.forward_ns)}
    for stage in replica.stages:
        for step in stage.instructions:
            if isinstance(step, SendStart):
                v = step.chunk * stages + stage.stage
                sent[step.payload == 1][step.micro_batch, v] = sum(map(prod, step.shapes))
    problem = replace(problem, forward_message_bytes=sent[True], backward_message_bytes=sent[False])
    problem = replace(problem, transfers=TransferRules(receive_ahead=receive_ahead))
    order = tuple(tuple(step for step in stage.instructions if isinstance(step, Pass)) for stage in replica.stages)
    counted = simulate(problem, order).peak_bytes
    held = tuple(peak_bytes(plan, replica, stage, 1) for stage in range(stages))
    if stages == 2 and chunks > 1:  # where activations, too, tell that a send is complete
        assert all(more >= bytes_ for more, bytes_ in zip(counted, held, strict=True))
    else:
        assert counted == held


@pytest.mark.parametrize("family", ModelFamily)
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("limit_mb", [40, 30])
def test_plans_leave_messages_room(family: ModelFamily, forward_only: bool, limit_mb: int) -> None:
    """Searched plans fill all memory, and are not found to exceed it by messages."""
    limit = {"memory_limit_bytes": limit_mb * 10**6, "pipeline_parallel": 4, "element_bytes": 4}
    plan = planner(family, **limit).plan(batch(family, 60), 0, forward_only=forward_only)
    verify(plan, element_bytes=4, fast_verify=fast_verify)
    with pytest.raises(PlanError, match=rf"stage \d: expected at most {limit_mb}.* MB, got"):
        verify(plan, element_bytes=400)
