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


CUDNN = """
import contextlib, io, time, torch
from megatron_dynapipe.megatron.models import padded_attention
from megatron_dynapipe.megatron.models.padded_attention import attend_padded, cudnn_attention

ran, aten = [], torch.library.Library("aten", "IMPL")
NAME = "_scaled_dot_product_cudnn_attention"
sizes = lambda: [tuple(row.shape) for row in ran]

from tests.helpers.rehearsal import kernels

def counted(query, *others, **options):
    ran.append(query)
    return kernels._cudnn_attention(query, *others, **options)

def become(kernel):
    aten.impl(NAME, kernel, "CUDA", allow_override=True)
    cudnn_attention.cache_clear()

def said(**changes):
    with contextlib.redirect_stdout(text := io.StringIO()):
        taken = cudnn_attention(**kind | changes)
    return taken is not None, text.getvalue().strip()

become(counted)
times = padded_attention.CudnnAttention.relative_time
padded_attention.CudnnAttention.relative_time = lambda _: 0.61
device = torch.device("cuda", torch.cuda.current_device())
kind = {"device": device, "dtype": torch.bfloat16, "heads": (4, 2), "channels": 128, "scale": 0.1}
WHAT = "attention of padded rows, 4 heads of 128 channels, 2 of keys: "
assert said() == (True, WHAT + "cuDNN's kernel, which takes 0.61 of FlashAttention's time")
assert sizes() == [(2, 4, 512, 128)]
assert said() == (True, ""), "tried once"
for change in ({"dtype": torch.float16}, {"channels": 64}, {"device": torch.device("cpu")}):
    assert said(**change) == (False, "")

ran.clear()
attention = cudnn_attention(**kind)
attention.build([(2, 520), (1, 40), (2, 570)])
attention.build([(2, 520)])
assert sizes() == [(2, 4, 576, 128)] * 2, "without gradients and with them, once for lengths that are padded alike"

def results(rows, order=None):
    attended = attend_padded(*rows, scale=0.1, order=order)
    return attended, *torch.autograd.grad(attended.float().square().sum(), rows)

rows = [torch.randn(520, 3, heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
ran.clear()
for one, other in zip(results(rows), results(rows, [padded_attention.SDPBackend.MATH]), strict=True):
    torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)
assert sizes() == [(3, 4, 576, 128)]

def refuse(*_, **__):
    raise RuntimeError("no engine for this graph\\nand more")

become(refuse)
assert said() == (False, WHAT + "FlashAttention, since PyTorch refuses cuDNN's kernel: no engine for this graph")

def wrong(query, *others, **options):
    output, *rest = kernels._cudnn_attention(query, *others, **options)
    return 1.1 * output, *rest

become(wrong)
takes, line = said()
assert not takes and "FlashAttention, since cuDNN's kernel is" in line, line

def slow(*given, **options):
    time.sleep(0.5)
    return kernels._cudnn_attention(*given, **options)

padded_attention.CudnnAttention.relative_time, padded_attention.TIMED = times, (1, 64)
become(slow)
state = torch.cuda.get_rng_state(device)
takes, line = said()
assert not takes and float(line.split("kernel takes ")[1].split()[0]) > 2, line
assert torch.equal(state, torch.cuda.get_rng_state(device))
"""

LAYERS = """
import os, torch
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.distributed.init_process_group("nccl", rank=0, world_size=1)
from types import SimpleNamespace
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape
from megatron_dynapipe.megatron.execution.iterations import IterationRunner
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.padded_attention import CudnnAttention
from tests.helpers.rehearsal import kernels

CudnnAttention.relative_time = lambda _: 0.61

parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(3)
ran = []

def counted(query, *others, **options):
    ran.append((query.size(0), query.size(2)))
    return kernels._cudnn_attention(query, *others, **options)

aten = torch.library.Library("aten", "IMPL")  # whose kernels go with it
aten.impl("_scaled_dot_product_cudnn_attention", counted, "CUDA", allow_override=True)

def layer(dropout=0.0):
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=2, kv_channels=128, attention_dropout=dropout, bf16=True
    )
    return SdpaCoreAttention(config, 1, AttnMaskType.causal, "self").cuda()

def rows(length):
    return [torch.randn(length, 2, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

def kernels_of(attention, length, mask=None, bias=None, kind=None):
    ran.clear()
    attention(*rows(length), mask, attn_mask_type=kind, attention_bias=bias)
    return list(ran)

attention, mask = layer(), torch.ones(520, 520, dtype=torch.bool, device="cuda").triu(1)[None, None]
assert not torch.backends.cuda.cudnn_sdp_enabled(), "but for the calls that ask for it"
assert kernels_of(attention, 64) == [(2, 512)], "tried at the first causal call, of whatever length"
assert kernels_of(attention, 64) == [] and kernels_of(attention, 520) == [(2, 576)]
assert kernels_of(attention, 520, mask=mask) == []
assert kernels_of(attention, 520, bias=torch.zeros(1, 2, 520, 520, device="cuda")) == []
assert kernels_of(attention, 520, kind=AttnMaskType.no_mask) == []
assert kernels_of(layer(dropout=0.1), 520) == []
assert not torch.backends.cuda.cudnn_sdp_enabled()

def entry(*batches):
    return SimpleNamespace(micro_batches=[SimpleNamespace(shape=s, layout=l) for s, l in batches])

settings = SimpleNamespace(model=SimpleNamespace(family=ModelFamily.T5))
steps = SimpleNamespace(device=torch.device("cuda", 0))
runner = IterationRunner(steps, settings, required=None, make_batch=None, seed=1)
ran.clear()
shapes = Shape(1, 64, 600), Shape(3, 1024, 64), Shape(1, 600, 600)
runner._attentions = [attention, layer()]
runner._build_attention(
    entry((shapes[0], BatchLayout.PADDED), (shapes[1], BatchLayout.PADDED), (shapes[2], BatchLayout.PACKED)),
)
assert ran == [(1, 640)] * 2, ran
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


def test_padded_rows_take_cudnns_kernel_where_it_is_faster_and_right():
    run("-c", CUDNN, devices=1)
    run("-c", LAYERS, devices=1)


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
