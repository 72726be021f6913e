"""Lists of a T5 with messages above NCCL's buffers, run without a model: every pass is a product, and makes tensors."""

import time

import msgspec
import torch
import torch.distributed as dist

from megatron_dynapipe.core.executor import Handlers
from megatron_dynapipe.core.instructions import SENT_BUFFER, Backward, Buffer, Forward, Load, SendStart
from megatron_dynapipe.core.network import CUDA_RULES
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.runtime import BufferTable, PipelineExecutor, PooledTransfers, TorchTransport, platform_of
from megatron_dynapipe.runtime.messages import message_bytes
from megatron_dynapipe.runtime.process_groups import group_of_each, make_groups, warm_up
from tests.core.planner_cases import batch, planner
from tests.helpers.layouts.layout import Layout

DTYPE = torch.bfloat16


def run(layout: Layout, *, steps: int, device: str, backend: str) -> dict[str, float]:
    """Run a plan's lists some times over; the largest message, the number of messages and seconds of a run."""
    dist.init_process_group(backend, init_method="env://")
    rank, tensor = dist.get_rank(), layout.tensor
    on = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    large = device == "cuda"
    made = planner(
        ModelFamily.T5, pipeline_parallel=layout.stages, transfers=CUDA_RULES, element_bytes=2, memory_limit_bytes=10**9
    )
    stages = made.plan(batch(ModelFamily.T5, 60), 0).replicas[0].stages
    pipelines = [[stage * tensor + each for stage in range(layout.stages)] for each in range(tensor)]
    groups = make_groups(pipelines, chunks=1, backend=backend, timeout_s=120)
    layers = group_of_each([range(s * tensor, (s + 1) * tensor) for s in range(layout.stages)], timeout_s=120)
    assert groups is not None
    warm_up(groups, on)
    plan = stages[rank // tensor]
    if large:
        plan = _widened(plan, 1 << 26)
    transport = TorchTransport(groups.channels, groups.ranks, deadline_s=120)
    executor = PipelineExecutor(PooledTransfers(transport, on, stages=layout.stages, dtype=DTYPE), platform_of(on))
    began = time.monotonic()
    for _ in range(steps):
        executor.execute(plan, _passes(plan, on, layers))
    platform_of(on).synchronize()
    sizes = [message_bytes(i.shapes, [DTYPE] * len(i.shapes)) for i in plan.instructions if isinstance(i, SendStart)]
    return {
        "largest_message_mb": max(sizes) / 1e6,
        "messages": len(sizes),
        "seconds": (time.monotonic() - began) / steps,
    }


def _widened(plan: StagePlan, least: int) -> StagePlan:
    """With hidden sizes at which the smallest tensors are so many bytes."""

    def wide(instruction: object) -> object:
        shapes = getattr(instruction, "shapes", None)
        if shapes is None:
            return instruction
        wider = tuple((*shape[:2], -(-least // (2 * shape[0] * shape[1]))) for shape in shapes)
        return msgspec.structs.replace(instruction, shapes=wider)

    return msgspec.structs.replace(plan, instructions=tuple(map(wide, plan.instructions)))


def _passes(plan: StagePlan, device: torch.device, layers: dist.ProcessGroup | None) -> Handlers:
    sent = {
        (SENT_BUFFER[i.payload], i.micro_batch, i.chunk): i.shapes
        for i in plan.instructions
        if isinstance(i, SendStart)
    }
    factor = torch.ones(64, 64, dtype=DTYPE, device=device)

    def handler(kind: Buffer) -> object:
        def handle(instruction: object, buffers: BufferTable) -> None:
            product = factor @ factor
            if layers is not None:
                dist.all_reduce(product, group=layers)
            shapes = sent.get((kind, instruction.micro_batch, instruction.chunk))
            if shapes is not None:
                made = [product[0, 0].expand(shape).contiguous() for shape in shapes]
                buffers.put(kind, instruction.micro_batch, instruction.chunk, made)

        return handle

    def load(instruction: Load, buffers: BufferTable) -> None:
        buffers.put(Buffer.DATA, instruction.micro_batch, 0, None)

    return {Load: load, Forward: handler(Buffer.OUTPUT), Backward: handler(Buffer.INPUT_GRAD)}
