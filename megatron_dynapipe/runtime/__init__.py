"""Executing one stage's plan: the instruction loop, buffers, transfers and the device beneath them.

Nothing here plans: an executor runs a hand-written list as readily as a planned one.
"""

from megatron_dynapipe.runtime.buffers import BufferTable
from megatron_dynapipe.runtime.executor import Handler, Handlers, PipelineExecutor
from megatron_dynapipe.runtime.graphs import Entry, StageGraph
from megatron_dynapipe.runtime.host_staged import HostStagedTransport
from megatron_dynapipe.runtime.platform import CpuPlatform, CudaPlatform, DevicePlatform, platform_of
from megatron_dynapipe.runtime.scatter_gather import ScatterGatherTransport
from megatron_dynapipe.runtime.trace import Trace
from megatron_dynapipe.runtime.transfer import TorchTransport, Transport, Work
from megatron_dynapipe.runtime.watchdog import Watchdog, watched

__all__ = [
    "BufferTable",
    "CpuPlatform",
    "CudaPlatform",
    "DevicePlatform",
    "Entry",
    "Handler",
    "Handlers",
    "HostStagedTransport",
    "PipelineExecutor",
    "ScatterGatherTransport",
    "StageGraph",
    "TorchTransport",
    "Trace",
    "Transport",
    "Watchdog",
    "Work",
    "platform_of",
    "watched",
]
