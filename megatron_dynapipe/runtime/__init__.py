"""Executing one stage's plan: the step runner, the instruction loop, passes, transfers and the device beneath them.

Nothing here plans: an executor runs a hand-written list as readily as a planned one.
"""

from megatron_dynapipe.core.executor import BufferTable, DevicePlatform, PipelineExecutor, Trace
from megatron_dynapipe.core.passes import Entry, PassContext, StageGraph, pass_handlers
from megatron_dynapipe.core.step import PendingTotals, Step, StepRunner, StepTotals
from megatron_dynapipe.runtime.platform import CpuPlatform, CudaPlatform, platform_of
from megatron_dynapipe.runtime.rank import step_runner
from megatron_dynapipe.runtime.scatter_gather import ScatterGatherTransport
from megatron_dynapipe.runtime.torch_transport import HostStagedTransport, TorchTransport
from megatron_dynapipe.runtime.transfers import PooledTransfers
from megatron_dynapipe.runtime.transport import Transport, Work
