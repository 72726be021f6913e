"""Ends a process that waits for a peer which is cut off: calls of torch's store may wait for as long as TCP tries."""

import math
import threading
import time
from collections.abc import Callable

_POLL_S = 1.0


class Watchdog:
    """Calls a function once nobody has reset it in time; not armed until `reset`.

    Args:
        limit_s: after which it is called, in a thread of its own.
        late: what is called; it ends the process.
    """

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        self._limit_s, self._late = limit_s, late
        self._due = math.inf
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def reset(self, more_s: float = 0.0) -> None:
        """Begin to count anew; `more_s` allows more time once."""
        self._due = time.monotonic() + self._limit_s + more_s

    def disarm(self) -> None:
        """Stop counting until the next `reset`."""
        self._due = math.inf

    def _watch(self) -> None:
        while time.monotonic() < self._due:
            time.sleep(min(_POLL_S, self._limit_s / 4))
        self._late()
