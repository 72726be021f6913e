"""Transfers on 2 stages × 2 tensor-parallel gloo ranks, whole and sharded: several tensors in order, channels apart.

What arrives is what was sent, sharded at half the bytes; a deadline names the instruction.
"""

import datetime
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.core.instructions import Backward, Buffer, Channel, Forward, Load, Payload
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.runtime import (
    CpuPlatform,
    HostStagedTransport,
    PipelineExecutor,
    PooledTransfers,
    ScatterGatherTransport,
    TorchTransport,
    Transport,
    Work,
)
from tests.helpers.lists import parse_stages
from tests.helpers.processes import RanksFailedError, run_ranks

WHOLE = float("inf")
TIMEOUT = datetime.timedelta(seconds=30)
SHAPES = {  # bytes of 4-byte elements in the comments
    "even": "2x3,4",  # 24, 16
    "odd": "5x3,1x1x1",  # 60, 4: half an element's shares
    "empty and odd": "0x3,7",  # 0, 28
}


class Counting:
    """A transport that counts the bytes it is given."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent, self.received = [], []

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        self.sent.append(sum(tensor.nbytes for tensor in tensors))
        return self._transport.start_send(channel, stage, tensors)

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        self.received.append(sum(tensor.nbytes for tensor in tensors))
        return self._transport.start_recv(channel, stage, tensors)


def make_executor(rank: int, *, shards_from: float, dtype: torch.dtype, staged: bool = False, deadline_s: float = 30):
    """Ranks 0, 1 are stage 0 and 2, 3 are stage 1; messages of at least so many bytes are sharded."""
    stage, tensor_rank = divmod(rank, 2)
    made: dict[tuple[int, ...], dict[Channel, dist.ProcessGroup]] = {}
    for pipeline in ((0, 2), (1, 3)):
        made[pipeline] = {
            Channel(payload, payload is Payload.ACTIVATION, False): dist.new_group(list(pipeline), timeout=TIMEOUT)
            for payload in Payload
        }
    tensor_groups = [dist.new_group(ranks, timeout=datetime.timedelta(seconds=2)) for ranks in ([0, 1], [2, 3])]
    pipeline = (tensor_rank, tensor_rank + 2)
    wire = TorchTransport(made[pipeline], pipeline, deadline_s=deadline_s)
    counting = Counting(HostStagedTransport(wire) if staged else wire)
    transport = ScatterGatherTransport(
        counting,
        tensor_groups[stage],
        stage=stage,
        is_sharded=lambda boundary, size: boundary == 0 and size >= shards_from,
    )
    platform = CpuPlatform()
    executor = PipelineExecutor(PooledTransfers(transport, platform.device, stages=2, dtype=dtype), platform)
    executor.register_handler(Load, lambda i, buffers: buffers.put(Buffer.DATA, i.micro_batch, 0, None))
    return executor, stage, counting


def lists(shapes: str) -> str:
    return f"""
stage 0: LOAD0 F0 FREE_DATA0 SEND_F0>1[{shapes}] RECV_B0<1[{shapes}] LOAD1 F1 FREE_DATA1 SEND_F1>1[2]
         WAIT_RECV_B0<1 RECV_B1<1[2] WAIT_SEND_F0>1 FREE_OUTPUT0 B0 FREE_OUTPUT_GRAD0
         WAIT_RECV_B1<1 WAIT_SEND_F1>1 FREE_OUTPUT1 B1 FREE_OUTPUT_GRAD1
stage 1: RECV_F0<0[{shapes}] LOAD0 WAIT_RECV_F0<0 RECV_F1<0[2] F0 FREE_DATA0 B0 FREE_INPUT0 SEND_B0>0[{shapes}]
         LOAD1 WAIT_RECV_F1<0 F1 FREE_DATA1 WAIT_SEND_B0>0 FREE_INPUT_GRAD0 B1 FREE_INPUT1 SEND_B1>0[2]
         WAIT_SEND_B1>0 FREE_INPUT_GRAD1
""".replace("\n         ", " ")


def drawn(shape: Sequence[int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits that a type can have, NaNs among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).view(shape)


def exchanges(*, rank: int, world_size: int, cases: list[dict]) -> list[dict]:
    dist.init_process_group("gloo")
    return [exchange(rank, **case) for case in cases]


def exchange(rank: int, *, shapes: str, shards_from: float, dtype: str, staged: bool) -> dict:
    """Both directions: stage 0 sends random tensors, stage 1 sends others back; every rank says if all came whole."""
    kind = getattr(torch, dtype)
    executor, stage, counting = make_executor(rank, shards_from=shards_from, dtype=kind, staged=staged)
    stages = parse_stages(lists(shapes))
    whole = [next(i.shapes for i in stages[0] if getattr(i, "shapes", None) and i.micro_batch == k) for k in (0, 1)]
    right = []

    def tensors(micro_batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        return tuple(drawn(s, seed + 10 * micro_batch + n, kind) for n, s in enumerate(whole[micro_batch]))

    def compare(actual: Sequence[torch.Tensor], micro_batch: int, seed: int) -> None:
        for one, other in zip(actual, tensors(micro_batch, seed), strict=True):
            right.append(one.shape == other.shape and one.view(torch.uint8).equal(other.view(torch.uint8)))

    def forward(instruction: Forward, buffers) -> None:
        k = instruction.micro_batch
        if stage == 0:
            buffers.put(Buffer.OUTPUT, k, 0, tensors(k, 100))
        else:
            compare(buffers.tensors(Buffer.INPUT, k, 0), k, 100)

    def backward(instruction: Backward, buffers) -> None:
        k = instruction.micro_batch
        if stage == 1:
            buffers.put(Buffer.INPUT_GRAD, k, 0, tensors(k, 200))
        else:
            compare(buffers.tensors(Buffer.OUTPUT_GRAD, k, 0), k, 200)

    executor.register_handler(Forward, forward)
    executor.register_handler(Backward, backward)
    for _ in range(2):
        executor.execute(StagePlan(stage=stage, instructions=stages[stage], predicted=()))
    return {"right": right, "sent": counting.sent, "received": counting.received}


def test_what_arrives_is_what_was_sent_bit_by_bit():
    """Also: a sharded message is half the bytes, and a small one goes whole."""
    cases = [
        {"shapes": shapes, "dtype": dtype, "shards_from": 0, "staged": False}
        for shapes in SHAPES.values()
        for dtype in ("float32", "bfloat16")
    ]
    cases.append({"shapes": "2x3,4", "dtype": "float32", "shards_from": WHOLE, "staged": False})
    cases.append({"shapes": "2x3,5", "dtype": "bfloat16", "shards_from": 22, "staged": True})
    for results in run_ranks(exchanges, 4, {"cases": cases}):
        for case, result in zip(cases, results, strict=True):
            assert len(result["right"]) == 6 and all(result["right"]), case
        assert results[-1]["sent"] == [8 + 5, 4] * 2  # of 12 + 10 bytes, the second at a multiple of 16, and of 4
        assert results[-1]["received"] == results[-1]["sent"]


def abandon(*, rank: int, world_size: int, silent: list[int], shards_from: float, deadline_s: float) -> None:
    """Some ranks are there, but send and gather nothing: an end would be noticed before the deadline."""
    dist.init_process_group("gloo")
    executor, stage, _ = make_executor(rank, shards_from=shards_from, dtype=torch.float32, deadline_s=deadline_s)
    instructions = parse_stages(
        "stage 0: F0 SEND_F0>1[4] WAIT_SEND_F0>1 FREE_OUTPUT0\nstage 1: RECV_F0<0[4] WAIT_RECV_F0<0 FREE_INPUT0"
    )[stage]
    executor.register_handler(Forward, lambda i, buffers: buffers.put(Buffer.OUTPUT, 0, 0, (torch.ones(4),)))
    executor.register_handler(Backward, lambda i, buffers: None)
    if rank in silent:
        time.sleep(6)
    else:
        executor.execute(StagePlan(stage=stage, instructions=instructions, predicted=()))


@pytest.mark.parametrize(
    ("silent", "shards_from", "deadline_s"),
    [([0, 1], WHOLE, 1), ([3], 0, 30)],
    ids=["a message that does not come", "a gather that a rank stays away from"],
)
def test_a_wait_fails_by_the_deadline_and_names_the_instruction(silent, shards_from, deadline_s):
    arguments = {"silent": silent, "shards_from": shards_from, "deadline_s": deadline_s}
    with pytest.raises(RanksFailedError, match=r"(?i)timed out[\s\S]*at stage 1, step 1: .*WAIT_RECV_F0<0"):
        run_ranks(abandon, 4, arguments, deadline_s=30)
