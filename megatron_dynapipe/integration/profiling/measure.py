"""Timing a part: warm up, repeat, take medians.

On CUDA devices time passes by events. On the CPU it is this thread's processor time, so that what else the machine is
busy with does not count; with several threads to an operation, and where ranks share a layer and wait for one another,
the wall clock's. A pipeline keeps several micro-batches in flight, so that a forward finds none of its memory in the
CPU's caches; so does the measurement, or forwards would look up to a third too fast.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

import torch

from megatron_dynapipe.integration.profiling.layers import Forward, Part, Point
from megatron_dynapipe.runtime.memory import PassMemory, pass_memory
from megatron_dynapipe.runtime.platform import CpuPlatform, DevicePlatform, Mark, platform_of

FEWEST_REPEATS = 3
MOST_REPEATS = 15
LONG_ENOUGH_S = 0.15
"""Repeating ends after this, with the fewest repeats done."""
SHARED_REPEATS = 5
"""Repeats of a layer that ranks share: clocks differ, and its passes must be as many on all of them."""
BEYOND_CACHES_BYTES = 100_000_000
"""Memory that passes in flight hold together on a CPU, if so few of them do."""
MOST_IN_FLIGHT = 12


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


def clock_of(device: torch.device, *, shared: bool) -> DevicePlatform:
    """The clock for measuring layers on a device; `shared`: several ranks share each layer."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and not shared
    return ThreadClock() if alone else platform_of(device)


def measure(
    part: Part, point: Point, platform: DevicePlatform, *, shared: bool, long_enough_s: float | None = None
) -> Sample:
    """Measure a part at a point, in the recompute mode it is set to.

    Args:
        part: what is measured.
        point: where.
        platform: the device's clock.
        shared: ranks share the part, and all of them measure it together.
        long_enough_s: repeating ends after this, with the fewest repeats done; None: `LONG_ENOUGH_S`.

    Raises:
        torch.OutOfMemoryError: the device has too little memory for it.
    """
    forward = part.prepare(point)
    memory = pass_memory(forward, _backward, platform.device)  # the warm-up, too
    in_flight = deque(forward() for _ in range(_in_flight(memory, platform.device) - 1))
    end = time.perf_counter() + (LONG_ENOUGH_S if long_enough_s is None else long_enough_s)
    forwards: list[int] = []
    backwards: list[int] = []
    fewest, most = (SHARED_REPEATS, SHARED_REPEATS) if shared else (FEWEST_REPEATS, MOST_REPEATS)
    while len(forwards) < fewest or (len(forwards) < most and time.perf_counter() < end):
        f, b = _time_once(forward, in_flight, platform)
        forwards.append(f)
        backwards.append(b)
    return Sample(forward_ns=round(median(forwards)), backward_ns=round(median(backwards)), memory=memory)


def _in_flight(memory: PassMemory, device: torch.device) -> int:
    if device.type != "cpu":
        return 1
    return min(max(BEYOND_CACHES_BYTES // max(memory.stored_bytes, 1), 1), MOST_IN_FLIGHT)


def _time_once(forward: Forward, in_flight: deque[torch.Tensor], platform: DevicePlatform) -> tuple[int, int]:
    """A forward, and the backward of the oldest output in flight."""
    platform.align()
    begin = platform.mark()
    in_flight.append(forward())
    middle = platform.mark()
    _backward(in_flight.popleft())
    end = platform.mark()
    platform.synchronize()
    return middle() - begin(), end() - middle()


def _backward(output: torch.Tensor) -> None:
    torch.autograd.backward(output, torch.ones_like(output))
