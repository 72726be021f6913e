"""One rank's steps over a transport: its executor, the clock of its device, its watchdog."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megatron_dynapipe.core.executor import PipelineExecutor, Trace
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.core.step import StepRunner
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.platform import platform_of
from megatron_dynapipe.runtime.transfers import PooledTransfers
from megatron_dynapipe.runtime.transport import GatedTransport, NoTransport, Transport
from megatron_dynapipe.runtime.watchdog import watched


def step_runner(
    transport: Transport,
    device: torch.device,
    *,
    stage: int,
    stages: int,
    chunks: int,
    dtype: torch.dtype,
    deadline_s: float,
    control: ControlGroup | None = None,
) -> StepRunner:
    """The runner of a rank's steps.

    Args:
        transport: moves tensors between stages.
        device: this rank's.
        stage: this rank's place in its pipeline.
        stages: ranks of the pipeline.
        chunks: virtual stages of each rank.
        dtype: the type of the tensors that cross stage boundaries.
        deadline_s: the deadline of every transfer; on CUDA a watchdog reports a device that is about to miss it.
        control: the group over which losses are added up; None where somebody else does it.

    Returns:
        A runner whose `close` ends the watchdog's thread; so does the end of the runner.
    """

    def executor_over(
        transport: Transport, watch: Callable[[StagePlan, Trace], None] | None = None
    ) -> PipelineExecutor:
        transfers = PooledTransfers(transport, device, stages=stages, dtype=dtype)
        return PipelineExecutor(transfers, platform_of(device), watch=watch)

    gated = GatedTransport(transport)
    with ExitStack() as resources:
        watch = resources.enter_context(watched(device, deadline_s=deadline_s, rank=dist.get_rank()))
        runner = StepRunner(
            executor_over(gated, watch),
            alone=lambda: executor_over(NoTransport()),
            gate=gated.wait_for,
            device=device,
            stage=stage,
            stages=stages,
            chunks=chunks,
            dtype=dtype,
            sums=control,
        )
        runner.close = weakref.finalize(runner, resources.pop_all().close)
    return runner
