"""The native proof of instruction lists; that it agrees with its twin on thousands of lists is tested in tests/plan."""

import random

import msgspec
import pytest

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.verify import verify, verify_lists
from megatron_dynapipe.plan.verify_buffers import Pipeline
from megatron_dynapipe.planning import prove as module
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.prove import prove
from tests.helpers.plans import make_plan

needs_native = pytest.mark.skipif(NATIVE is None, reason="the native core is not built")


def lists_of(plan):
    return [stage.instructions for stage in plan.replicas[0].stages]


@needs_native
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("forward_only", [False, True])
def test_passes_and_sends_are_found(chunks, forward_only):
    lists = lists_of(make_plan((3,), 3, chunks=chunks, forward_only=forward_only))
    steps = prove(Pipeline(stages=3, chunks=chunks, micro_batches=3, forward_only=forward_only), lists)
    for names, found in (("Forward Backward", steps.passes), ("SendStart", steps.sends)):
        assert found == [[i for i, step in enumerate(each) if type(step).__name__ in names] for each in lists]


@needs_native
def test_bytes_that_are_no_lists_prove_nothing():
    lists = lists_of(make_plan((2,), 2))
    data = msgspec.msgpack.encode(lists)
    assert NATIVE.prove(data, 1, 2, False)[0]
    for end in range(len(data)):
        assert not NATIVE.prove(data[:end], 1, 2, False)[0]
    assert not NATIVE.prove(data + b"\0", 1, 2, False)[0]
    choose = random.Random(0)
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(len(data))] = choose.randrange(256)
        if NATIVE.prove(bytes(changed), 1, 2, False)[0]:
            verify_lists(msgspec.msgpack.decode(changed, type=list[list[Instruction]]), micro_batches=2)
    assert not NATIVE.prove(b"\xdd\xff\xff\xff\xff", 1, 2, False)[0]


@needs_native
@pytest.mark.parametrize(
    ("chunks", "micro_batches", "message"),
    [
        (0, 1, "between 1 and 4096 chunks"),
        (1, -1, "at most 2"),
        (4096, 4097, r"at most 2\^24 micro-batches times chunks"),
    ],
)
def test_the_native_boundary_refuses_what_does_not_fit(chunks, micro_batches, message):
    with pytest.raises(ValueError, match=f"expected {message}"):
        NATIVE.prove(b"\x90", chunks, micro_batches, False)


def test_the_twin_says_why_and_is_asked_where_the_core_is_not_built(monkeypatch):
    plan = make_plan((2,), 2)
    verify(plan, prove=prove)
    replica = plan.replicas[0]
    stage = msgspec.structs.replace(replica.stages[0], instructions=replica.stages[0].instructions[:-1])
    broken = msgspec.structs.replace(replica, stages=(stage, *replica.stages[1:]))
    with pytest.raises(PlanError, match="the list ends with OUTPUT_GRAD of micro-batch 1, chunk 0 USED"):
        verify(msgspec.structs.replace(plan, replicas=(broken,)), prove=prove)
    monkeypatch.setattr(module, "NATIVE", None)
    assert prove(Pipeline(stages=2, chunks=1, micro_batches=2, forward_only=False), lists_of(plan)) is None
    verify(plan, prove=prove)
