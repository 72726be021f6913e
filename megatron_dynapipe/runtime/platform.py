"""The device beneath an executor: where tensors live and how time passes there."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Mark = Callable[[], int]
"""A moment on the device: call it, once the device has passed it, for its time in nanoseconds."""


class DevicePlatform(Protocol):
    """What the executor needs to know of a device."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
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


class CpuPlatform:
    """The host itself: work is done when the call returns."""

    device = torch.device("cpu")

    def mark(self) -> Mark:
        """The monotonic clock, which all processes of a host share."""
        now = time.monotonic_ns()
        return lambda: now

    def has_passed(self, mark: Mark) -> bool:
        """Always: a mark is made when the work before it is done."""
        return True

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def peak_bytes(self) -> int | None:
        """The host's allocator does not count."""
        return None


class CudaPlatform:
    """One CUDA device; time passes on its current stream, so that marks cost no synchronisation.

    Event times are put on the host's monotonic clock through one event recorded beside it at construction; they
    drift from it by microseconds per second, which matters to pictures of one iteration only.
    """

    def __init__(self, index: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._origin = self._event()
        torch.cuda.synchronize(self.device)
        self._origin_ns = time.monotonic_ns()

    def mark(self) -> Mark:
        """A CUDA event on the current stream."""
        return _CudaMark(self._event(), self._origin, self._origin_ns)

    def has_passed(self, mark: Mark) -> bool:
        """Asks the mark's event."""
        assert isinstance(mark, _CudaMark), "a mark of another platform"
        return bool(mark.event.query())

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def peak_bytes(self) -> int | None:
        """Of the caching allocator."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


@dataclass(frozen=True, slots=True)
class _CudaMark:
    """An event, and another whose time on the host's clock is known."""

    event: torch.cuda.Event
    origin: torch.cuda.Event
    origin_ns: int

    def __call__(self) -> int:
        self.event.synchronize()
        return self.origin_ns + int(self.origin.elapsed_time(self.event) * 1e6)


def platform_of(device: torch.device) -> DevicePlatform:
    """The platform of a device: the same code paths serve both kinds."""
    return CudaPlatform(device.index) if device.type == "cuda" else CpuPlatform()
