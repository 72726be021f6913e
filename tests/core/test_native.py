"""The fast verification of instruction lists; tests/plan holds it against `verify` on thousands of corrupted lists."""

import random
import subprocess
import sys

import msgspec
import pytest

from megatron_dynapipe.core.instructions import Instruction
from megatron_dynapipe.core.memory import message_elements
from megatron_dynapipe.core.native import core, fast_verify
from megatron_dynapipe.core.verify_buffers import Dimensions
from tests.helpers.lists import verify_lists
from tests.helpers.plans import make_plan


def lists_of(plan):
    return [stage.instructions for stage in plan.replicas[0].stages]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("forward_only", [False, True])
def test_passes_and_sends_are_found(chunks, forward_only):
    lists = lists_of(make_plan((3,), 3, chunks=chunks, forward_only=forward_only))
    steps = fast_verify(Dimensions(stages=3, chunks=chunks, micro_batches=3, forward_only=forward_only), lists)
    for names, found in (("Forward Backward", steps.passes), ("SendStart", steps.sends)):
        assert found == [[i for i, step in enumerate(each) if type(step).__name__ in names] for each in lists]
    assert steps.messages == [message_elements(each, forward_only=forward_only) for each in lists]


def test_bytes_that_are_no_lists_hold_nothing():
    lists = lists_of(make_plan((2,), 2))
    data = msgspec.msgpack.encode(lists)
    assert core.fast_verify(data, 1, 2, False)[0]
    for end in range(len(data)):
        assert not core.fast_verify(data[:end], 1, 2, False)[0]
    assert not core.fast_verify(data + b"\0", 1, 2, False)[0]
    choose = random.Random(0)
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(len(data))] = choose.randrange(256)
        if core.fast_verify(bytes(changed), 1, 2, False)[0]:
            verify_lists(msgspec.msgpack.decode(changed, type=list[list[Instruction]]), micro_batches=2)
    assert not core.fast_verify(b"\xdd\xff\xff\xff\xff", 1, 2, False)[0]


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
        core.fast_verify(b"\x90", chunks, micro_batches, False)


def test_a_missing_core_says_how_to_build_it():
    code = "import sys; sys.modules['megatron_dynapipe.core._native'] = None\nimport megatron_dynapipe.core.planner"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "InstallationError: expected the planner's native core" in done.stderr
    assert "hint: install this package again with this Python" in done.stderr
