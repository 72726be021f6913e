"""Timing a part: warm up, repeat, take medians, divide by its layers.

On CUDA devices time passes by events, and passes are launched one behind another, as in training: a device that waits
for its first kernel would have that wait timed, and one that rests raises its clock. Before anything is timed it works
for some seconds (`sustain`), and at every point for a moment.

On the CPU time is this thread's processor time, so that what else the machine is busy with does not count; with several
threads to an operation, and where ranks share a layer and wait for one another, the wall clock's. A pipeline keeps
several micro-batches in flight, so that a forward finds none of its memory in the CPU's caches; so does the
measurement, or forwards would look up to a third too fast.

Ranks that share a layer measure it together; others measure points of their own at the same time:

    shared        rank 0   point 0    point 1    point 2         means of times, largest of memories
                  rank 1   point 0    point 1    point 2
    not shared    rank 0   point 0    point 3    point 4         in turns, so that a rank that is slower than the
                  rank 1   point 1    point 2    point 5         others is so everywhere
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple, override

import torch
import torch.distributed as dist

from megatron_dynapipe.core.executor import DevicePlatform, Mark
from megatron_dynapipe.core.units import Recompute, Shape
from megatron_dynapipe.costing.format import PROCESSOR_SHARE, REPEATS_SPREAD
from megatron_dynapipe.megatron.profiling.layers import Forward, MeasuredModule, Point
from megatron_dynapipe.runtime.memory import PassMemory, pass_memory
from megatron_dynapipe.runtime.platform import CpuPlatform, platform_of

FEWEST_REPEATS = 3
MOST_REPEATS = 15
HURRIED_S = 0.05
"""Long enough where time is short; on a CPU one pass that takes this long is measured once."""
LONG_ENOUGH_S = 0.15
"""Repeating ends after this, with the fewest repeats done."""
SHARED_REPEATS = 5
"""Repeats of a layer that ranks share: clocks differ, and its passes must be as many on all of them."""
BEYOND_CACHES_BYTES = 100_000_000
"""Memory that passes in flight hold together on a CPU, if so few of them do."""
MOST_IN_FLIGHT = 12
SUSTAINED_S = 3.0
WARM_S = 0.05
SHARED_WARM = 3
"""Work of a GPU before anything is timed, before each point, and there in passes where ranks share the layer."""
SUSTAINING_ROWS = 8192
"""Positions of the products that a GPU works on, at most."""


class Values(NamedTuple):
    """Costs of one pass of one layer of a part through one point: medians over the repeats."""

    forward_ns: int
    backward_ns: int
    stored_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class Noise:
    """How quiet the machine was while this rank measured.

    Attributes:
        spreads: distances between the quartiles of each point's times, relative to the median.
        processor_s, wall_s: this thread's processor time while passes ran one after another, and the time that passed;
            0 where passes wait for a device or for other ranks.
    """

    spreads: list[float] = field(default_factory=list)
    processor_s: float = 0.0
    wall_s: float = 0.0

    def add(self, times: Sequence[tuple[int, int]]) -> None:
        """Take the (forward, backward) times of one point's repeats, in ns."""
        if len(times) >= FEWEST_REPEATS:
            low, middle, high = quantiles([forward + backward for forward, backward in times], n=4)
            self.spreads.append((high - low) / max(middle, 1))

    def described(self) -> dict[str, str | int | float | bool]:
        """For a file's provenance: what is known of the share of a processor that passes had, and of the spread."""
        told: dict[str, str | int | float | bool] = {}
        if self.wall_s:
            told[PROCESSOR_SHARE] = round(self.processor_s / self.wall_s, 3)
        if self.spreads:
            told[REPEATS_SPREAD] = round(median(self.spreads), 3)
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The subject of a profile, and how it is measured.

    Attributes:
        parts: what is measured, by name.
        modes: recompute modes of the layers; the head has none.
        within: the largest size and lengths of a micro-batch that a run may ask for.
        most_positions: the most positions of a micro-batch that is measured.
        platform: the device's clock.
        shared: whether ranks share the layers; if not, each measures points of its own.
        hurried: as in `measure`.
        noise: is told of every measurement.
    """

    parts: Mapping[str, MeasuredModule]
    modes: Sequence[Recompute]
    within: Shape
    most_positions: int
    platform: DevicePlatform
    shared: bool = False
    hurried: bool = False
    noise: Noise = field(default_factory=Noise)

    def measure(self, part: MeasuredModule, point: Point, *, timed: bool = True) -> Values | None:
        """`measure` the part, with a single layer where several do not fit; None where memory runs out."""
        run = partial(
            measure,
            point=point,
            platform=self.platform,
            shared=self.shared,
            hurried=self.hurried,
            timed=timed,
            noise=self.noise,
        )
        return largest_that_fits(part, run, shared=self.shared)


class ThreadClock(CpuPlatform):
    """The CPU, on which time passes only while this thread runs."""

    @override
    def mark(self) -> Mark:
        now = time.thread_time_ns()
        return lambda: now


def clock_of(device: torch.device, *, shared: bool) -> DevicePlatform:
    """The clock for measuring layers on a device; `shared`: several ranks share each layer."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and not shared
    return ThreadClock() if alone else platform_of(device)


def measure(
    part: MeasuredModule,
    point: Point,
    platform: DevicePlatform,
    *,
    shared: bool,
    hurried: bool = False,
    timed: bool = True,
    noise: Noise | None = None,
) -> Values:
    """Measure a part at a point, in the recompute mode it is set to; raises torch.OutOfMemoryError.

    If `shared`, ranks share the part, and all of them measure it together; if `hurried`, time is too short to repeat
    much. Times are 0 unless `timed`. `noise` is told of the repeats.
    """
    forward = part.prepare(point)
    memory = _of_one_layer(pass_memory(forward, part.backward, platform.device), part.layers)  # the warm-up, too
    if not timed:
        return Values(0, 0, memory.stored_bytes, memory.peak_bytes)
    in_flight = deque(forward() for _ in range(_in_flight(memory, platform.device, shared=shared) - 1))
    on_cpu = platform.device.type == "cpu"
    fewest, most = (SHARED_REPEATS, SHARED_REPEATS) if shared else (FEWEST_REPEATS, MOST_REPEATS)
    together = 1 if on_cpu else fewest
    if hurried and on_cpu and not shared:
        fewest = 1
    if together > 1:
        _warm_up(part, forward, platform, passes=SHARED_WARM if shared else None)
    began = time.perf_counter()
    ran_s = time.thread_time()
    end = began + (HURRIED_S if hurried else LONG_ENOUGH_S)
    times: list[tuple[int, int]] = []
    while len(times) < fewest or (len(times) < most and time.perf_counter() < end):
        times += _time(part, forward, in_flight, platform, passes=together)
    if noise is not None:
        noise.add(times)
        if isinstance(platform, ThreadClock):
            noise.processor_s += time.thread_time() - ran_s
            noise.wall_s += time.perf_counter() - began
    forward_ns, backward_ns = (round(median(side) / part.layers) for side in zip(*times, strict=True))
    return Values(forward_ns, backward_ns, memory.stored_bytes, memory.peak_bytes)


def sustain(device: torch.device, *, positions: int, hidden: int, seconds: float = SUSTAINED_S) -> None:
    """Let a GPU work on products as wide as the model until its clock is that of training.

    One that has rested runs faster at first.
    """
    if device.type != "cuda":
        return
    rows = torch.zeros(min(positions, SUSTAINING_ROWS), hidden, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.zeros(hidden, hidden, dtype=torch.bfloat16, device=device).normal_()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            rows @ weight
        torch.cuda.synchronize(device)


def _warm_up(part: MeasuredModule, forward: Forward, platform: DevicePlatform, *, passes: int | None) -> None:
    """So many passes, or as many as take `WARM_S`."""
    end = time.perf_counter() + WARM_S
    done = 0
    while done < passes if passes is not None else time.perf_counter() < end:
        part.backward(forward())
        platform.synchronize()
        done += 1


def _of_one_layer(memory: PassMemory, layers: int) -> PassMemory:
    """The memory that one of several layers keeps, and the last one's high-water mark above what others keep."""
    stored = memory.stored_bytes // layers
    return PassMemory(stored_bytes=stored, peak_bytes=memory.peak_bytes - stored * (layers - 1))


def _in_flight(memory: PassMemory, device: torch.device, *, shared: bool) -> int:
    if device.type != "cpu":
        return 1
    count = min(max(BEYOND_CACHES_BYTES // max(memory.stored_bytes, 1), 1), MOST_IN_FLIGHT)
    return _fewest_of_ranks(count) if shared else count


def _fewest_of_ranks(count: int) -> int:
    """The least of all ranks' numbers: what a rank keeps of a head depends on which labels are its own."""
    least = torch.tensor([count])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def _time(
    part: MeasuredModule, forward: Forward, in_flight: deque[Any], platform: DevicePlatform, *, passes: int
) -> list[tuple[int, int]]:
    """ns of forwards, each with the backward of the oldest output in flight, launched without a wait between them."""
    platform.align()
    marks = []
    for _ in range(passes):
        begin = platform.mark()
        in_flight.append(forward())
        middle = platform.mark()
        part.backward(in_flight.popleft())
        marks.append((begin, middle, platform.mark()))
    platform.synchronize()
    return [(middle() - begin(), end() - middle()) for begin, middle, end in marks]


def communicable() -> torch.device:
    """Where tensors of the default group live."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def at_once(*, shared: bool) -> int:
    """How many points ranks measure at the same time."""
    return 1 if shared else dist.get_world_size()


def measured_by_ranks(
    measures: Sequence[Callable[[], Values | None]], *, turn: int, shared: bool
) -> list[Values | None]:
    """The results of `at_once` measurements at most, the same on all ranks; None where memory was too small.

    Each rank runs another, or if `shared` all run the one that there is. `turn` counts the calls before.
    """
    if shared:
        return [measure() for measure in measures]
    size = dist.get_world_size()
    number = (dist.get_rank() + turn) % size
    values = measures[number]() if number < len(measures) else None
    words = torch.tensor([0] * 5 if values is None else [1, *values], dtype=torch.int64, device=communicable())
    gathered = [torch.empty_like(words) for _ in range(size)]
    dist.all_gather(gathered, words)
    rows = [[int(word) for word in gathered[(at - turn) % size].tolist()] for at in range(len(measures))]
    return [Values(*row[1:]) if row[0] else None for row in rows]


def largest_that_fits(part: MeasuredModule, run: Callable[[MeasuredModule], Values], *, shared: bool) -> Values | None:
    """Measure the part; with a single layer where several do not fit on a rank that shares it."""
    for layers in part.from_most_layers:
        try:
            values: Values | None = run(layers)
        except torch.OutOfMemoryError:
            values = None
        if shared:
            values = _over_ranks(values)
        if values is not None:
            return values
    return None


def _over_ranks(values: Values | None) -> Values | None:
    """Mean times and largest memory over the ranks; None where it did not fit on one of them."""
    fits = torch.tensor([values is not None], dtype=torch.int64, device=communicable())
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    if not fits.item() or values is None:
        return None
    times = torch.tensor(values[:2], device=communicable())
    dist.all_reduce(times)
    sizes = torch.tensor(values[2:], device=communicable())
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    forward, backward = (int(time) // dist.get_world_size() for time in times)
    stored, peak = (int(size) for size in sizes)
    return Values(forward, backward, stored, peak)
