"""The rehearsed device itself: what torch says of it, and what it refuses as CUDA does."""

import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.entry_scripts import ROOT
from tests.helpers.rehearsal import build, launch

pytestmark = pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++")

SCRIPT = """
import copy, io, torch, torch.distributed as dist

assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and "H100" in torch.cuda.get_device_name()
linear = torch.nn.Linear(8, 4).to("cuda:1")
linear(torch.ones(3, 8, device="cuda:1")).relu().sum().backward()
assert linear.weight.grad.device == torch.device("cuda", 1) and torch.cuda.memory_allocated(1) > 0
torch.optim.AdamW(linear.parameters(), fused=True).step()
assert linear.weight.data[1:].t().contiguous().is_cuda and not linear.weight.cpu().is_cuda
torch.save([linear.weight, linear.weight.detach()[1]], file := io.BytesIO())
to_device = lambda storage, _: storage.cuda()
for where, loaded in ((None, "cuda:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0"), (to_device, "cuda:0")):
    file.seek(0)
    weight, row = torch.load(file, map_location=where)
    assert weight.device == row.device == torch.device(loaded) and weight.cpu().equal(linear.weight.cpu())
    assert row.data_ptr() == weight.data_ptr() + 8 * 4
assert copy.deepcopy(linear).weight.data_ptr() != linear.weight.data_ptr()
assert torch.ones(2).pin_memory().is_pinned() and not torch.ones(2).is_pinned()

def refused(call, message):
    try:
        call()
    except RuntimeError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

refused(lambda: torch.ones(3, device="cuda") + torch.ones(3), "on the same device")
refused(lambda: torch.ones(3, device="cuda:5"), "invalid device ordinal")

before = torch.get_rng_state()
torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
drawn = torch.nn.functional.dropout(torch.ones(50, device="cuda"), 0.5)
torch.cuda.set_rng_state(state)
assert drawn.equal(torch.nn.functional.dropout(torch.ones(50, device="cuda"), 0.5))
assert before.equal(torch.get_rng_state()), "a device's numbers are its own"

start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record(), end.record(), end.synchronize()
assert start.elapsed_time(end) >= 0 and end.query()
with torch.cuda.stream(side := torch.cuda.Stream()):
    assert torch.cuda.current_stream() == side

from megatron_dynapipe.runtime.memory import pass_memory

scale, inputs = torch.ones(16, device="cuda", requires_grad=True), [torch.ones(4096, device="cuda")]

def forward():
    inputs[0] = torch.ones(16, device="cuda")  # of the pass before until now
    return scale * inputs[0]

def backward(output):
    torch.autograd.grad(output.sum(), scale)

# The thread that ran a backward may let go of its last gradient a moment later, and so within the next forward.
memories = [pass_memory(forward, backward, torch.device("cuda")) for _ in range(3)]
assert max(memory.stored_bytes for memory in memories) == 64, "the output alone"

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(total := torch.ones(3, device="cuda"))
assert total.equal(torch.ones(3, device="cuda"))
refused(lambda: dist.all_reduce(torch.ones(3)), "No backend type associated with device type cpu")
dist.destroy_process_group()

from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as attend

offsets = torch.tensor([0, 4, 10], dtype=torch.int32, device="cuda")
rows = [torch.randn(10, 2, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
packed = varlen_attn(*rows, offsets, offsets, 6, 6, window_size=(-1, 0))
alone = torch.cat([
    attend(*(row[a:b].transpose(0, 1)[None] for row in rows), is_causal=True)[0].transpose(0, 1)
    for a, b in ((0, 4), (4, 10))
])
gradient = torch.randn_like(packed)
ours, theirs = (torch.autograd.grad(result, rows, gradient, retain_graph=True) for result in (packed, alone))
for one, other in zip((packed, *ours), (alone, *theirs), strict=True):
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
"""


FORKED_LATE = """
import os, sys, torch

assert torch.cuda.is_available()  # CUDA has been asked
if (child := os.fork()) == 0:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        os._exit(3 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
BY_A_DEVICE_ALONE = {
    "test_marks_tell_the_devices_time_and_pass_in_order": "assert not True",  # work that runs beside the host
    "test_the_watchdog_names_the_instruction_at_which_the_device_stands": "assert heard.wait(10)",  # likewise
    "test_relative_biases_compiled_once_are_those_by_sample": "rehearsed uncompiled",  # a kernel that Inductor makes
}
"""Tests marked `gpu` that fail on rehearsed devices, and with what: they get as far as what is wanting there."""


def run(*words: str, status: int = 0, **machine: Any) -> str:
    """What Python says on such a machine."""
    command = [sys.executable, *words]
    done = subprocess.run(
        command, env=launch.environment(**machine), cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_device_is_one_for_all_of_torch():
    run("-c", SCRIPT, devices=2)


def test_a_process_forked_after_cuda_was_asked_gets_no_device():
    run("-c", FORKED_LATE, devices=1, status=3)


@pytest.mark.slow
def test_what_is_marked_gpu_passes():
    named = f"not ({' or '.join(BY_A_DEVICE_ALONE)})"
    said = run("-m", "pytest", "tests", "-q", "-m", "gpu", "-k", named, devices=1, engine=True)
    assert "skipped" not in said, said


@pytest.mark.slow
def test_what_a_device_alone_passes_fails_for_want_of_it():
    said = run("-m", "pytest", "tests", "-q", "-m", "gpu", "-k", " or ".join(BY_A_DEVICE_ALONE), devices=1, status=1)
    assert f"{len(BY_A_DEVICE_ALONE)} failed" in said, said
    assert all(reason in said for reason in BY_A_DEVICE_ALONE.values()), said
