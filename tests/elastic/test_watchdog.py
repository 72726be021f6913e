"""The watchdog calls once it has not been reset in time, and not before."""

import threading
import time

from megatron_dynapipe.elastic.watchdog import Watchdog


def test_it_calls_when_it_is_late_and_only_while_it_is_armed() -> None:
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
