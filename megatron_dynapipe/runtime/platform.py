"""The devices beneath an executor: how time passes on each, and what it says of its memory."""

import time
from dataclasses import dataclass

import torch

from megatron_dynapipe.core.executor import DevicePlatform, Mark

ANCHOR_LASTS_NS = 60 * 10**9
"""After this long the drift between a device's clock and the host's is corrected."""


class CpuPlatform:
    """The host itself: work is done when the call returns."""

    device = torch.device("cpu")

    def align(self) -> None:
        """Nothing to do: an integer clock does not lose precision."""

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

    CUDA gives the time between two events as a float32 of milliseconds: exact to 1 µs over ten seconds, to 8 ms over a
    day. So marks are timed from the event at their iteration's beginning (`align`), and that event from an anchor whose
    time on the host's monotonic clock is known. The two clocks drift apart by microseconds per second, which pictures
    of several ranks would show, so an anchor older than `ANCHOR_LASTS_NS` is replaced.
    """

    def __init__(self, index: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = torch.cuda.current_stream(self.device)
        self._stretch = self._anchored(self._event())

    def align(self) -> None:
        """Record the event from which marks are timed; waits for the device if the anchor has to be replaced."""
        self._stream = torch.cuda.current_stream(self.device)
        start = self._event()
        anchor_ns = self._stretch.anchor_ns
        if time.monotonic_ns() - anchor_ns > ANCHOR_LASTS_NS:
            self._stretch = self._anchored(start)
        else:
            self._stretch = _Stretch(start, self._stretch.anchor, anchor_ns)

    def mark(self) -> Mark:
        """A CUDA event on the stream that was current when the iteration began."""
        return _CudaMark(self._event(), self._stretch)

    def has_passed(self, mark: Mark) -> bool:
        """Asks the mark's event."""
        assert isinstance(mark, _CudaMark), "a mark of another platform"
        return bool(mark.event.query())

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def peak_bytes(self) -> int | None:
        """The peak of the caching allocator."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    @staticmethod
    def _anchored(event: torch.cuda.Event) -> "_Stretch":
        event.synchronize()
        return _Stretch(event, event, time.monotonic_ns())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The event from which an iteration's marks are timed, and an earlier one whose time on the host is known."""

    start: torch.cuda.Event
    anchor: torch.cuda.Event
    anchor_ns: int


@dataclass(frozen=True, slots=True)
class _CudaMark:
    """An event, and the stretch that it is in."""

    event: torch.cuda.Event
    stretch: _Stretch

    def __call__(self) -> int:
        self.event.synchronize()
        stretch = self.stretch
        start_ns: int = stretch.anchor_ns + round(stretch.anchor.elapsed_time(stretch.start) * 1e6)
        after_ns: int = round(stretch.start.elapsed_time(self.event) * 1e6)
        return start_ns + after_ns


def platform_of(device: torch.device) -> DevicePlatform:
    """The platform of a device: the same code paths serve both kinds."""
    return CudaPlatform(device.index) if device.type == "cuda" else CpuPlatform()
