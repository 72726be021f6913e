import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.plan.instructions import Backward, Forward, RecvStart, RecvWait, SendStart, SendWait
from megatron_dynapipe.plan.text import format_instruction, parse_stages
from megatron_dynapipe.plan.verify import verify_lists
from megatron_dynapipe.planning.lowering import (
    Topology,
    add_data,
    add_frees,
    add_recv_starts,
    add_recv_waits,
    add_send_waits,
    add_sends,
    lower,
)
from megatron_dynapipe.planning.schedules import SCHEDULES
from tests.helpers.plans import random_problem

SHAPE = ((8, 1, 4),)


def topology(stages: int, micro_batches: int, *, chunks: int = 1, forward_only: bool = False) -> Topology:
    shapes = ((SHAPE,) * (stages * chunks - 1),) * micro_batches
    return Topology(stages=stages, chunks=chunks, shapes=shapes, forward_only=forward_only)


def lines(lists):
    return [" ".join(format_instruction(step) for step in steps) for steps in lists]


def stages(*texts):
    return parse_stages("\n".join(f"stage {stage}: {text}" for stage, text in enumerate(texts)))


def test_data_comes_before_the_first_pass_and_goes_after_the_last_forward():
    assert lines(add_data(stages("F0 F1 B0 B1"))) == ["LOAD0 F0 FREE_DATA0 LOAD1 F1 FREE_DATA1 B0 B1"]
    assert lines(add_data(stages("F0 F0.1 B0.1 B0"))) == ["LOAD0 F0 F0.1 FREE_DATA0 B0.1 B0"]


def test_results_are_sent_right_away():
    two = add_sends(stages("F0 B0", "F0 B0"), topology(2, 1))
    assert lines(two) == ["F0 SEND_F0>1[8x1x4] B0", "F0 B0 SEND_B0>0[8x1x4]"]
    wrapped = add_sends(stages("F0 F0.1", "F0 F0.1"), topology(2, 1, chunks=2))
    assert lines(wrapped) == [
        "F0 SEND_F0>1[8x1x4] F0.1 SEND_F0.1>1[8x1x4]",
        "F0 SEND_F0>0[8x1x4] F0.1",
    ]


def test_passes_wait_for_their_input():
    given = stages("F0 SEND_F0>1[8x1x4] B0", "F0 B0 SEND_B0>0[8x1x4]")
    assert lines(add_recv_waits(given, topology(2, 1))) == [
        "F0 SEND_F0>1[8x1x4] RECV_B0<1[8x1x4] WAIT_RECV_B0<1 B0",
        "RECV_F0<0[8x1x4] WAIT_RECV_F0<0 F0 B0 SEND_B0>0[8x1x4]",
    ]


def test_messages_that_a_channel_carries_first_are_waited_for_first():
    given = stages("F0 SEND_F0>1[8x1x4] F1 SEND_F1>1[8x1x4]", "F1 F0")
    assert lines(add_recv_waits(given, topology(2, 2)))[1] == (
        "RECV_F0<0[8x1x4] WAIT_RECV_F0<0 RECV_F1<0[8x1x4] WAIT_RECV_F1<0 F1 F0"
    )


def test_receives_start_as_soon_as_their_channel_is_free():
    given = stages(
        "RECV_F0<1[8x1x4] WAIT_RECV_F0<1 F0 RECV_F1<1[8x1x4] WAIT_RECV_F1<1 F1 RECV_B0<1[8x1x4] WAIT_RECV_B0<1"
    )
    assert lines(add_recv_starts(given)) == [
        "RECV_F0<1[8x1x4] RECV_B0<1[8x1x4] WAIT_RECV_F0<1 RECV_F1<1[8x1x4] F0 WAIT_RECV_F1<1 F1 WAIT_RECV_B0<1"
    ]


def test_sends_are_waited_for_once_an_answer_proves_them_complete():
    given = stages(
        "F0 SEND_F0>1[8x1x4] F1 SEND_F1>1[8x1x4] WAIT_RECV_B0<1 B0 WAIT_RECV_B1<1 B1",
        "WAIT_RECV_F0<0 F0 B0 SEND_B0>0[8x1x4] WAIT_RECV_F1<0 F1 B1 SEND_B1>0[8x1x4]",
    )
    assert lines(add_send_waits(given, topology(2, 2))) == [
        "F0 SEND_F0>1[8x1x4] F1 SEND_F1>1[8x1x4] WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 "
        "WAIT_RECV_B1<1 WAIT_SEND_F1>1 FREE_OUTPUT1 B1",
        "WAIT_RECV_F0<0 F0 B0 SEND_B0>0[8x1x4] WAIT_RECV_F1<0 F1 B1 SEND_B1>0[8x1x4] "
        "WAIT_SEND_B0>0 FREE_INPUT_GRAD0 WAIT_SEND_B1>0 FREE_INPUT_GRAD1",
    ]


def test_what_was_received_is_dropped_after_its_last_use():
    assert lines(add_frees(stages("F0 B0", "F0 B0"), topology(2, 1))) == [
        "F0 B0 FREE_OUTPUT_GRAD0",
        "F0 B0 FREE_INPUT0",
    ]
    forward_only = topology(2, 1, forward_only=True)
    assert lines(add_frees(stages("F0", "F0"), forward_only)) == ["F0", "F0 FREE_INPUT0"]


def test_the_whole_way_down():
    order = ((Forward(0), Backward(0)), (Forward(0), Backward(0)))
    assert lines(lower(order, topology(2, 1))) == [
        "RECV_B0<1[8x1x4] LOAD0 F0 SEND_F0>1[8x1x4] FREE_DATA0 WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 "
        "FREE_OUTPUT_GRAD0",
        "RECV_F0<0[8x1x4] LOAD0 WAIT_RECV_F0<0 F0 FREE_DATA0 B0 FREE_INPUT0 SEND_B0>0[8x1x4] WAIT_SEND_B0>0 "
        "FREE_INPUT_GRAD0",
    ]


def test_a_replica_without_micro_batches_does_nothing():
    assert lower(((), ()), topology(2, 0)) == ((), ())


def test_several_chunks_need_several_ranks():
    with pytest.raises(AssertionError, match="no use for several chunks"):
        topology(1, 1, chunks=2)


@given(
    micro_batches=st.integers(0, 8),
    ranks=st.integers(2, 5),
    chunks=st.integers(1, 3),
    forward_only=st.booleans(),
    method=st.sampled_from(sorted(SCHEDULES)),
    seed=st.integers(0, 1000),
)
def test_every_schedule_lowers_to_lists_that_verify(micro_batches, ranks, chunks, forward_only, method, seed):
    problem = random_problem(micro_batches, ranks, chunks=chunks, forward_only=forward_only, seed=seed)
    order = SCHEDULES[method](problem)
    lists = lower(order, topology(ranks, micro_batches, chunks=chunks, forward_only=forward_only))
    verify_lists(lists, micro_batches=micro_batches, chunks=chunks, forward_only=forward_only)
    for steps, passes in zip(lists, order, strict=True):
        assert tuple(step for step in steps if isinstance(step, Forward | Backward)) == passes
        for payload in {step.payload for step in steps if isinstance(step, RecvStart)}:
            kinds = [type(s) for s in steps if isinstance(s, RecvStart | RecvWait) and s.payload is payload]
            assert kinds == [RecvStart, RecvWait] * (len(kinds) // 2)


@given(micro_batches=st.integers(2, 8), ranks=st.integers(2, 5), seed=st.integers(0, 1000))
def test_in_a_full_pipeline_sends_are_not_kept_to_the_end(micro_batches, ranks, seed):
    problem = random_problem(micro_batches, ranks, seed=seed)
    lists = lower(SCHEDULES["1f1b"](problem), topology(ranks, micro_batches))
    for steps in lists:
        last_pass = max(i for i, step in enumerate(steps) if isinstance(step, Forward | Backward))
        left = [s for s in steps[last_pass:] if isinstance(s, SendWait)]
        assert len(left) <= 2 * ranks  # what the last forwards and backwards leave


@given(
    micro_batches=st.integers(0, 12),
    ranks=st.integers(2, 5),
    chunks=st.integers(1, 3),
    method=st.sampled_from(sorted(SCHEDULES)),
)
def test_forward_only_plans_keep_few_outputs(micro_batches, ranks, chunks, method):
    problem = random_problem(micro_batches, ranks, chunks=chunks, forward_only=True)
    lists = lower(SCHEDULES[method](problem), topology(ranks, micro_batches, chunks=chunks, forward_only=True))
    verify_lists(lists, micro_batches=micro_batches, chunks=chunks, forward_only=True)
    for rank, steps in enumerate(lists):
        held = most = 0
        for step in steps:
            held += isinstance(step, SendStart) and step.peer == rank + 1
            held -= isinstance(step, SendWait) and step.peer == rank + 1
            most = max(most, held)
        assert most <= 4


def test_ranks_that_run_forwards_in_different_orders_keep_outputs_to_the_end():
    order = (tuple(map(Forward, range(8))), tuple(map(Forward, (1, 0, 2, 3, 4, 5, 6, 7))))
    lists = lower(order, topology(2, 8, forward_only=True))
    verify_lists(lists, micro_batches=8, forward_only=True)
    last = max(i for i, step in enumerate(lists[0]) if isinstance(step, Forward))
    assert not any(isinstance(step, SendWait) for step in lists[0][:last])
