"""A CUDA device's clock, whose differences are floats of milliseconds: fine marks however long a run has lasted."""

import numpy as np
import pytest
import torch

from megatron_dynapipe.runtime import CudaPlatform, platform

DAY_NS = 86_400 * 10**9
DRIFT = 1 + 2e-5


class Clock:
    """The host's nanoseconds; the device's clock is faster by 20 microseconds per second, and idle."""

    def __init__(self) -> None:
        self.now_ns = 5 * DAY_NS
        self.waits = 0

    def event(self, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)

    def monotonic_ns(self) -> int:
        return self.now_ns


class FakeEvent:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self, stream: object) -> None:
        self.device_ms = self.clock.now_ns * DRIFT / 1e6

    def synchronize(self) -> None:
        self.clock.waits += 1

    def elapsed_time(self, later: "FakeEvent") -> float:
        return float(np.float32(later.device_ms - self.device_ms))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(platform, "time", made)
    return made


@pytest.mark.parametrize("age_ns", [0, 50 * 10**9, DAY_NS])
def test_marks_are_told_apart_finely_and_on_the_hosts_clock(clock, age_ns):
    device = CudaPlatform(0)
    clock.now_ns += age_ns
    device.align()
    clock.now_ns += 10**9
    begin, told = device.mark(), clock.now_ns
    clock.now_ns += 100_000
    end = device.mark()
    assert abs(end() - begin() - 100_000) < 200
    assert abs(begin() - told) < 2_000_000, "of a minute's drift at most"


def test_the_device_is_waited_for_once_a_minute_at_most(clock):
    device = CudaPlatform(0)
    before = clock.waits
    for _ in range(600):
        clock.now_ns += 10**9
        device.align()
    assert clock.waits - before == 9  # every 61 s
