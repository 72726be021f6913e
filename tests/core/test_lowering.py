import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.instructions import (
    Backward,
    Forward,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    format_instruction,
)
from megatron_dynapipe.core.lowering import (
    PipelineTopology,
    add_data,
    add_frees,
    add_recv_starts,
    add_recv_waits,
    add_send_waits,
    add_sends,
    lower,
)
from megatron_dynapipe.core.model import BoundaryTensor, boundary_shapes, boundary_tensors
from megatron_dynapipe.core.orders import SCHEDULES
from megatron_dynapipe.core.units import ModelFamily, Shape
from megatron_dynapipe.costing import PipelineLayout, model_of_layers
from tests.helpers.lists import parse_stages, verify_lists
from tests.helpers.plans import random_problem

SHAPE = ((8, 1, 4),)


def topology(stages: int, micro_batches: int, *, chunks: int = 1, forward_only: bool = False) -> PipelineTopology:
    shapes = ((SHAPE,) * (stages * chunks - 1),) * micro_batches
    return PipelineTopology(stages=stages, chunks=chunks, shapes=shapes, forward_only=forward_only)


def lines(lists):
    return [" ".join(format_instruction(step) for step in steps) for steps in lists]


def stages(*texts):
    return parse_stages("\n".join(f"stage {stage}: {text}" for stage, text in enumerate(texts)))


TWO = topology(2, 2)
CHUNKS, EVALUATION = topology(2, 1, chunks=2), topology(2, 1, forward_only=True)
SENT = "F0 SEND_F0>1[8x1x4] B0", "F0 B0 SEND_B0>0[8x1x4]"


@pytest.mark.parametrize(
    ("lowered", "expected"),
    [
        pytest.param(
            add_data(stages("F0 F1 B0 B1", "F0 F0.1 B0.1 B0")),
            ["LOAD0 F0 FREE_DATA0 LOAD1 F1 FREE_DATA1 B0 B1", "LOAD0 F0 F0.1 FREE_DATA0 B0.1 B0"],
            id="data comes before the first pass and goes after the last forward",
        ),
        pytest.param(add_sends(stages("F0 B0", "F0 B0"), TWO), [*SENT], id="results are sent right away"),
        pytest.param(
            add_sends(stages("F0 F0.1", "F0 F0.1"), CHUNKS),
            ["F0 SEND_F0>1[8x1x4] F0.1 SEND_F0.1>1[8x1x4]", "F0 SEND_F0>0[8x1x4] F0.1"],
            id="also to the next chunk",
        ),
        pytest.param(
            add_recv_waits(stages(*SENT), TWO),
            [
                "F0 SEND_F0>1[8x1x4] RECV_B0<1[8x1x4] WAIT_RECV_B0<1 B0",
                "RECV_F0<0[8x1x4] WAIT_RECV_F0<0 F0 B0 SEND_B0>0[8x1x4]",
            ],
            id="passes wait for their input",
        ),
        pytest.param(
            add_recv_waits(stages("F0 SEND_F0>1[8x1x4] F1 SEND_F1>1[8x1x4]", "F1 F0"), TWO)[1:],
            ["RECV_F0<0[8x1x4] WAIT_RECV_F0<0 RECV_F1<0[8x1x4] WAIT_RECV_F1<0 F1 F0"],
            id="messages that a channel carries first are waited for first",
        ),
        pytest.param(
            add_recv_starts(
                stages(
                    "RECV_F0<1[8x1x4] WAIT_RECV_F0<1 F0 RECV_F1<1[8x1x4] WAIT_RECV_F1<1 F1 "
                    "RECV_B0<1[8x1x4] WAIT_RECV_B0<1"
                )
            ),
            ["RECV_F0<1[8x1x4] RECV_B0<1[8x1x4] WAIT_RECV_F0<1 RECV_F1<1[8x1x4] F0 WAIT_RECV_F1<1 F1 WAIT_RECV_B0<1"],
            id="receives start as soon as their channel is free",
        ),
        pytest.param(
            add_send_waits(
                stages(
                    "F0 SEND_F0>1[8x1x4] F1 SEND_F1>1[8x1x4] WAIT_RECV_B0<1 B0 WAIT_RECV_B1<1 B1",
                    "WAIT_RECV_F0<0 F0 B0 SEND_B0>0[8x1x4] WAIT_RECV_F1<0 F1 B1 SEND_B1>0[8x1x4]",
                ),
                TWO,
            ),
            [
                "F0 SEND_F0>1[8x1x4] F1 SEND_F1>1[8x1x4] WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 "
                "WAIT_RECV_B1<1 WAIT_SEND_F1>1 FREE_OUTPUT1 B1",
                "WAIT_RECV_F0<0 F0 B0 SEND_B0>0[8x1x4] WAIT_RECV_F1<0 F1 B1 SEND_B1>0[8x1x4] "
                "WAIT_SEND_B0>0 FREE_INPUT_GRAD0 WAIT_SEND_B1>0 FREE_INPUT_GRAD1",
            ],
            id="sends are waited for once an answer proves them complete",
        ),
        pytest.param(
            add_frees(stages("F0 B0", "F0 B0"), TWO),
            ["F0 B0 FREE_OUTPUT_GRAD0", "F0 B0 FREE_INPUT0"],
            id="what was received is dropped after its last use",
        ),
        pytest.param(
            add_frees(stages("F0", "F0"), EVALUATION), ["F0", "F0 FREE_INPUT0"], id="in an evaluation after its forward"
        ),
        pytest.param(
            lower(((Forward(0), Backward(0)),) * 2, topology(2, 1)),
            [
                "RECV_B0<1[8x1x4] LOAD0 F0 SEND_F0>1[8x1x4] FREE_DATA0 WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 "
                "FREE_OUTPUT_GRAD0",
                "RECV_F0<0[8x1x4] LOAD0 WAIT_RECV_F0<0 F0 FREE_DATA0 B0 FREE_INPUT0 SEND_B0>0[8x1x4] WAIT_SEND_B0>0 "
                "FREE_INPUT_GRAD0",
            ],
            id="the whole way down",
        ),
    ],
)
def test_passes_over_lists(lowered, expected):
    assert lines(lowered) == expected


def test_a_replica_without_micro_batches_and_a_rank_without_neighbours():
    assert lower(((), ()), topology(2, 0)) == ((), ())
    with pytest.raises(AssertionError, match="no use for several chunks"):
        topology(1, 1, chunks=2)


@given(
    micro_batches=st.integers(0, 12),
    ranks=st.integers(2, 6),
    chunks=st.integers(1, 4),
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


E, D = BoundaryTensor.ENCODER, BoundaryTensor.DECODER


def test_gpt_passes_one_tensor():
    layout = PipelineLayout.of_layers(model_of_layers(ModelFamily.GPT, 8), (2, 3, 3))
    assert boundary_tensors(layout) == ((E,), (E,))


def test_shapes():
    tensors, shapes = ((E,), (E, D)), [Shape(3, 64, 16)]
    assert boundary_shapes(tensors, shapes, hidden_size=128) == ((((64, 3, 128),), ((64, 3, 128), (16, 3, 128))),)
    divided = boundary_shapes(tensors, shapes, hidden_size=128, sequence_parallel=4)
    assert divided == ((((16, 3, 128),), ((16, 3, 128), (4, 3, 128))),)


def test_refusals():
    with pytest.raises(PlanningError, match="expected a hidden size and a sequence-parallel size of at least 1"):
        boundary_shapes((), [], hidden_size=0)
    with pytest.raises(PlanningError, match="expected the lengths of shape 3x64 to be divisible by the sequence-par"):
        boundary_shapes(((E,),), [Shape(3, 64)], hidden_size=128, sequence_parallel=3)
