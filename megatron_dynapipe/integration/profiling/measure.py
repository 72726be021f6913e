"""Timing a part: warm up, repeat, take medians.

On CUDA devices time passes by events. On the CPU it is this thread's processor time, so that what else the machine is
busy with does not count; with several threads to an operation, the wall clock's.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch

from megatron_dynapipe.integration.profiling.layers import Forward, Part, Point
from megatron_dynapipe.integration.profiling.memory import PassMemory, pass_memory
from megatron_dynapipe.runtime.platform import CpuPlatform, DevicePlatform, Mark, platform_of

FEWEST_REPEATS = 3
MOST_REPEATS = 15
LONG_ENOUGH_S = 0.15
"""Repeating ends after this, with the fewest repeats done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one pass of a part through one point costs: medians over the repeats."""

    forward_ns: int
    backward_ns: int
    memory: PassMemory


class ThreadClock(CpuPlatform):
    """The CPU, on which time passes only while this thread runs."""

    def mark(self) -> Mark:
        """Processor time of this thread."""
        now = time.thread_time_ns()
        return lambda: now


def clock_of(device: torch.device) -> DevicePlatform:
    """How time is told on a device when layers are measured."""
    return ThreadClock() if device.type == "cpu" and torch.get_num_threads() == 1 else platform_of(device)


def measure(part: Part, point: Point, platform: DevicePlatform) -> Sample:
    """Measure a part at a point, in the recompute mode it is set to.

    Raises:
        torch.OutOfMemoryError: the device has too little memory for it.
    """
    forward = part.prepare(point)
    memory = pass_memory(forward, _backward, platform.device)  # the warm-up, too
    started = time.perf_counter()
    forwards: list[int] = []
    backwards: list[int] = []
    while len(forwards) < FEWEST_REPEATS or (
        len(forwards) < MOST_REPEATS and time.perf_counter() - started < LONG_ENOUGH_S
    ):
        f, b = _time_once(forward, platform)
        forwards.append(f)
        backwards.append(b)
    return Sample(forward_ns=round(median(forwards)), backward_ns=round(median(backwards)), memory=memory)


def _time_once(forward: Forward, platform: DevicePlatform) -> tuple[int, int]:
    platform.align()
    begin = platform.mark()
    output = forward()
    middle = platform.mark()
    _backward(output)
    end = platform.mark()
    platform.synchronize()
    return middle() - begin(), end() - middle()


def _backward(output: torch.Tensor) -> None:
    torch.autograd.backward(output, torch.ones_like(output))
