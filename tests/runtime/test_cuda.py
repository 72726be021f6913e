"""What the runtime does on a CUDA device, in one process: marks, staging, gathers, the watchdog."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.core.instructions import Channel, Forward, Load, Payload
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.runtime import (
    CudaPlatform,
    HostStagedTransport,
    PipelineExecutor,
    PooledTransfers,
    ScatterGatherTransport,
    Work,
)
from megatron_dynapipe.runtime.messages import MessageBuffers
from megatron_dynapipe.runtime.watchdog import ListWatchdog

pytestmark = pytest.mark.gpu

CHANNEL = Channel(Payload.ACTIVATION, True, False)


def busy(seconds: float) -> None:
    """Give the device something to do for about so long."""
    torch.cuda._sleep(int(seconds * 1.5e9))


class Mirror:
    """A transport that sends every message back to where it came from."""

    def __init__(self) -> None:
        self.sent: list[list[torch.Tensor]] = []

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        self.sent.append([tensor.clone() for tensor in tensors])
        return Done(lambda: None)

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        def fill() -> None:
            for tensor, sent in zip(tensors, self.sent.pop(0), strict=True):
                tensor.copy_(sent)

        return Done(fill)


class Done:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def test_marks_tell_the_devices_time_and_pass_in_order():
    platform = CudaPlatform()
    before = platform.mark()
    busy(0.2)
    after = platform.mark()
    assert not platform.has_passed(after)
    platform.synchronize()
    assert platform.has_passed(before) and platform.has_passed(after)
    assert 0.01e9 < after() - before() < 5e9
    assert abs(after() - time.monotonic_ns()) < 5e9


def test_peak_memory_is_that_since_the_last_question():
    platform = CudaPlatform()
    platform.peak_bytes()
    large = torch.empty(64_000_000, dtype=torch.uint8, device="cuda")
    del large
    assert platform.peak_bytes() >= 64_000_000
    assert platform.peak_bytes() < torch.cuda.memory_allocated() + 64_000_000


def test_staged_messages_wait_for_the_device_that_makes_them():
    mirror = Mirror()
    staged = HostStagedTransport(mirror)
    busy(0.1)
    made = [torch.arange(1000, device="cuda") * 3, torch.ones(3, 5, dtype=torch.bfloat16, device="cuda")]
    staged.start_send(CHANNEL, 1, made).wait()
    assert all(not tensor.is_cuda for tensor in mirror.sent[0])
    received = [torch.zeros_like(tensor) for tensor in made]
    staged.start_recv(CHANNEL, 0, received).wait()
    assert all(one.equal(other) for one, other in zip(received, made, strict=True))


def test_gathers_run_over_nccl_without_holding_up_the_host():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mirror, group = Mirror(), dist.new_group([0])
        transport = ScatterGatherTransport(mirror, group, stage=0, is_sharded=lambda boundary, size: True)
        made = torch.randn(7, 3, device="cuda").to(torch.bfloat16)
        received = torch.zeros_like(made)
        transport.start_send(CHANNEL, 1, [made]).wait()
        warm = transport.start_recv(CHANNEL, 1, [received])
        warm.wait()
        assert received.equal(made)
        transport.start_send(CHANNEL, 1, [made]).wait()
        busy(0.5)
        began = time.monotonic()
        transport.start_recv(CHANNEL, 1, [received]).wait()
        assert time.monotonic() - began < 0.2
    finally:
        dist.destroy_process_group()


def test_the_watchdog_names_the_instruction_at_which_the_device_stands():
    said, heard = [], threading.Event()

    def tell(message: str) -> None:
        said.append(message)
        heard.set()

    with ListWatchdog(deadline_s=0.5, name="rank 0", report=tell) as watchdog:
        platform = CudaPlatform()
        transfers = PooledTransfers(Mirror(), platform.device, stages=2, dtype=torch.float32)
        executor = PipelineExecutor(transfers, platform, watch=watchdog)
        executor.register_handler(Load, lambda instruction, buffers: None)
        executor.register_handler(Forward, lambda instruction, buffers: busy(3))
        executor.execute(StagePlan(stage=0, instructions=(Load(0), Forward(0)), predicted=()))
        assert heard.wait(10)
    assert "step 1" in said[0] and "F0" in said[0]
    torch.cuda.synchronize()


def test_buffers_are_received_into_again_though_a_transfer_was_recorded_on_them():
    """As NCCL does with what it receives; the allocator would keep such memory until the device has passed."""
    device = torch.device("cuda", torch.cuda.current_device())
    pool, transfers, places = MessageBuffers(device), torch.cuda.Stream(device), set()
    pool.begin(1 << 20)
    for value in range(3):
        busy(0.01)
        buffer = pool.take()
        transfers.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(transfers):
            buffer.fill_(value)
        buffer.record_stream(transfers)
        torch.cuda.current_stream(device).wait_stream(transfers)
        assert int(buffer.sum()) == value << 20
        places.add(buffer.data_ptr())
        del buffer
    assert len(places) == 1
