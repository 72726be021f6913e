"""Transfers over gloo: several tensors in order, channels apart, deadlines that name the instruction."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.plan.instructions import Backward, Buffer, Channel, Forward, Load, Payload
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.plan.text import parse_stages
from megatron_dynapipe.runtime import CpuPlatform, PipelineExecutor, TorchTransport
from tests.helpers.processes import RanksFailedError, run_ranks

LISTS = """
stage 0: LOAD0 F0 FREE_DATA0 SEND_F0>1[2x3,4] RECV_B0<1[2x3,4] LOAD1 F1 FREE_DATA1 SEND_F1>1[5x3,4]
         WAIT_RECV_B0<1 RECV_B1<1[5x3,4] WAIT_SEND_F0>1 FREE_OUTPUT0 B0 FREE_OUTPUT_GRAD0
         WAIT_RECV_B1<1 WAIT_SEND_F1>1 FREE_OUTPUT1 B1 FREE_OUTPUT_GRAD1
stage 1: RECV_F0<0[2x3,4] LOAD0 WAIT_RECV_F0<0 RECV_F1<0[5x3,4] F0 FREE_DATA0 B0 FREE_INPUT0 SEND_B0>0[2x3,4]
         LOAD1 WAIT_RECV_F1<0 F1 FREE_DATA1 WAIT_SEND_B0>0 FREE_INPUT_GRAD0 B1 FREE_INPUT1 SEND_B1>0[5x3,4]
         WAIT_SEND_B1>0 FREE_INPUT_GRAD1
""".replace("\n         ", " ")


def _executor(rank: int, deadline_s: float = 30) -> PipelineExecutor:
    timeout = datetime.timedelta(seconds=30)
    groups = {
        Channel(payload, payload is Payload.ACTIVATION, False): dist.new_group([0, 1], backend="gloo", timeout=timeout)
        for payload in Payload
    }
    transport = TorchTransport(groups, [0, 1], deadline_s=deadline_s)
    executor = PipelineExecutor(transport, CpuPlatform(), stages=2, dtype=torch.float32)
    executor.register_handler(Load, lambda i, buffers: buffers.put(Buffer.DATA, i.micro_batch, 0, None))
    return executor


def _exchange(*, rank: int, world_size: int) -> list[float]:
    """Stage 0 sends two tensors of micro-batch k, filled with k + 1; stage 1 sends them back times ten."""
    dist.init_process_group("gloo")
    executor, seen = _executor(rank), []

    def forward(instruction: Forward, buffers) -> None:
        k = instruction.micro_batch
        if rank == 0:
            shape = (2, 3) if k == 0 else (5, 3)
            buffers.put(Buffer.OUTPUT, k, 0, (torch.full(shape, k + 1.0), torch.full((4,), k + 1.5)))

    def backward(instruction: Backward, buffers) -> None:
        k = instruction.micro_batch
        if rank == 0:
            seen.extend(tensor.unique().item() for tensor in buffers.tensors(Buffer.OUTPUT_GRAD, k, 0))
        else:
            buffers.put(Buffer.INPUT_GRAD, k, 0, tuple(10 * t for t in buffers.tensors(Buffer.INPUT, k, 0)))

    executor.register_handler(Forward, forward)
    executor.register_handler(Backward, backward)
    lists = parse_stages(LISTS)
    for _ in range(3):
        executor.execute(StagePlan(stage=rank, instructions=lists[rank], predicted=()))
    return seen


def test_boundaries_of_two_tensors_and_varying_shapes_cross_both_ways():
    assert run_ranks(_exchange, 2)[0] == [10.0, 15.0, 20.0, 25.0] * 3


def _wait_for_nothing(*, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")
    executor = _executor(rank, deadline_s=1)
    if rank == 0:
        time.sleep(4)  # there, but silent: its end would be noticed before the deadline
    else:
        instructions = parse_stages("stage 0:\nstage 1: RECV_F0<0[2] WAIT_RECV_F0<0 FREE_INPUT0")[1]
        executor.execute(StagePlan(stage=1, instructions=instructions, predicted=()))


def test_a_message_that_does_not_come_fails_by_the_deadline_and_names_the_instruction():
    with pytest.raises(
        RanksFailedError, match=r"(?i)timed out[\s\S]*at stage 1, step 1: RECV_F0<0\[2\] --> WAIT_RECV_F0<0"
    ):
        run_ranks(_wait_for_nothing, 2, deadline_s=30)
