"""A plan store inside one process: the contract of `PlanStore` without a server."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.redis_store import check_value, check_wait, timeout_error


class MemoryStore:
    """Keys and topics in dictionaries under one condition variable; its methods are `PlanStore`'s."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._progress: dict[str, int] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        for key, value in items:
            check_value(key, value)
            with self._changed:
                self._check_open()
                self._values.setdefault(key, bytes(value))
                self._changed.notify_all()

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:

        def present() -> tuple[str, bytes] | None:
            return next(((key, self._values[key]) for key in keys if key in self._values), None)

        return self._wait(present, keys, timeout_s, what)

    def delete(self, keys: Sequence[str]) -> None:
        with self._changed:
            self._check_open()
            for key in keys:
                self._values.pop(key, None)
                self._progress.pop(key, None)

    def announce(self, topic: str, value: int) -> None:
        assert value >= 0, f"progress is never negative, got {value}"
        with self._changed:
            self._check_open()
            self._progress[topic] = max(value, self._progress.get(topic, value))
            self._changed.notify_all()

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        with self._changed:
            self._check_open()
            return {topic: self._progress[topic] for topic in topics if topic in self._progress}

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:

        def reached() -> dict[str, int] | None:
            return {
                topic: self._progress[topic] for topic in goals if self._progress.get(topic, -1) >= goals[topic]
            } or None

        return self._wait(reached, list(goals), timeout_s, what)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait[T](self, ready: Callable[[], T | None], awaited: Sequence[str], timeout_s: float, what: str) -> T:
        check_wait(awaited, timeout_s)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check_open()
                if (found := ready()) is not None:
                    return found
                if not self._changed.wait(deadline - time.monotonic()):
                    raise timeout_error(what, awaited, timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the plan store is closed")
