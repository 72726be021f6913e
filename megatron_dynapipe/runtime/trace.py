"""When each instruction of an iteration ran on this stage, and the port to the device that tells the time."""

from collections.abc import Callable
from typing import Protocol

import torch

from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.timeline import Event

Mark = Callable[[], int]
"""A moment on the device: call it, once the device has passed it, for its time in nanoseconds."""


class DevicePlatform(Protocol):
    """The facts of a device that the executor needs (`runtime.platform` has those of a CPU and of CUDA)."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        ...

    def align(self) -> None:
        """Begin an iteration's marks: their times stay exact to a microsecond for some seconds after this call."""
        ...

    def mark(self) -> Mark:
        """Mark the present moment of the device's work, without waiting for it."""
        ...

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has passed one of its marks, without waiting for it."""
        ...

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        ...

    def peak_bytes(self) -> int | None:
        """High-water mark of device memory since the last call, or None where the device does not count."""
        ...


class Trace:
    """A mark after every instruction, at which the next one starts; read once the device has passed them."""

    def __init__(self, platform: DevicePlatform) -> None:
        self._mark = platform.mark
        self._has_passed = platform.has_passed
        self._instructions: list[Instruction] = []
        platform.align()
        self._marks: list[Mark] = [platform.mark()]

    def __len__(self) -> int:
        """Instructions that have been issued."""
        return len(self._instructions)

    def add(self, instruction: Instruction) -> None:
        """An instruction has been issued."""
        self._marks.append(self._mark())
        self._instructions.append(instruction)

    def moment(self) -> Mark:
        """Mark the present moment of the device's work on the clock of the instructions, after or between them."""
        return self._mark()

    def reached(self) -> int:
        """Instructions that the device has passed, without waiting for it; the next is where it stands."""
        ends = self._marks[1 : len(self) + 1]
        return next((step for step, end in enumerate(ends) if not self._has_passed(end)), len(ends))

    def events(self) -> tuple[Event, ...]:
        """The instructions with their start and end on the host's monotonic clock, in nanoseconds.

        Waits until the device has passed the last of them.
        """
        times = [mark() for mark in self._marks]
        return tuple(map(Event, self._instructions, times, times[1:]))

    def span_ns(self) -> int:
        """The time from the first instruction's start to the last one's end; waits until the device has passed it."""
        return self._marks[-1]() - self._marks[0]()
