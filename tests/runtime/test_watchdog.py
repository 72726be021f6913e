"""The watchdog names the instruction at which a device stands still, once, and says nothing of one that moves."""

import threading
import time
from collections.abc import Callable

import torch

from megatron_dynapipe.core.instructions import Backward, Forward, Load
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.runtime import PipelineExecutor, PooledTransfers
from megatron_dynapipe.runtime.watchdog import ListWatchdog, Watchdog, watched

LIST = (Load(0), Forward(0), Backward(0))
PLAN = StagePlan(stage=1, instructions=LIST, predicted=())


class LaggingDevice:
    """A device that is told everything at once and does it when it is let."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.done = 0
        self.made = 0

    def align(self) -> None: ...

    def mark(self) -> Callable[[], int]:
        self.made += 1
        number = self.made
        return lambda: number

    def has_passed(self, mark: Callable[[], int]) -> bool:
        return mark() <= self.done

    def synchronize(self) -> None: ...

    def peak_bytes(self) -> None: ...


def executed(device: LaggingDevice, watchdog: ListWatchdog) -> None:
    transfers = PooledTransfers(None, device.device, stages=2, dtype=torch.float32)
    executor = PipelineExecutor(transfers, device, watch=watchdog)
    for kind in (Load, Forward, Backward):
        executor.register_handler(kind, lambda instruction, buffers: None)
    executor.execute(PLAN)


def test_a_device_that_stands_still_is_reported_once():
    said, heard = [], threading.Event()

    def tell(message: str) -> None:
        said.append(message)
        heard.set()

    device = LaggingDevice()
    with ListWatchdog(deadline_s=0.1, name="rank 3", report=tell) as watchdog:
        device.done = 2  # the list's beginning, and the end of the load
        executed(device, watchdog)
        assert heard.wait(60)
        time.sleep(0.3)
    assert len(said) == 1
    assert said[0].startswith("[rank 3] no progress for 0.08 s at stage 1, step 1: ")
    assert "F0" in said[0]
    assert said[0].endswith('(if all stages say so: docs/reliability.md, "What waits for a whole GPU")')


def test_only_a_rank_on_cuda_is_watched_by_a_thread_on_its_device(monkeypatch):
    chosen: dict[str, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: chosen.update({threading.current_thread().name: d}))
    with watched(torch.device("cpu"), deadline_s=1, rank=0) as watchdog:
        assert watchdog is None
    with watched(torch.device("cuda", 1), deadline_s=1, rank=0) as watchdog:
        assert isinstance(watchdog, ListWatchdog)
    assert chosen == {"dynapipe-watchdog": torch.device("cuda", 1)}


def test_a_device_that_has_done_everything_is_not():
    said: list[str] = []
    device = LaggingDevice()
    with ListWatchdog(deadline_s=0.05, name="rank 3", report=said.append) as watchdog:
        device.done = 1000
        executed(device, watchdog)
        time.sleep(0.3)
    assert not said


def test_a_watchdog_calls_when_it_is_late_and_only_while_it_is_armed() -> None:
    called = threading.Event()
    watchdog = Watchdog(0.4, called.set)
    assert not called.wait(0.8), "never armed"
    for _ in range(8):
        watchdog.reset()
        time.sleep(0.1)
    assert not called.is_set(), "reset in time"
    watchdog.reset(0.4)
    watchdog.disarm()
    assert not called.wait(1.0), "disarmed"
    watchdog.reset(0.4)
    began = time.monotonic()
    assert called.wait(60) and time.monotonic() - began > 0.7
