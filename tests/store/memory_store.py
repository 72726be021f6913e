"""A store in this process's memory: what another store than Redis would have to do, and no more."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from megatron_dynapipe.core.errors import StoreTimeoutError


class MemoryStore:
    """See `megatron_dynapipe.store.protocol.Store`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._progress: dict[str, int] = {}
        self._changed = threading.Condition()

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        with self._changed:
            self._values = dict(items) | self._values
            self._changed.notify_all()

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:
        def there() -> dict[str, bytes]:
            return {key: self._values[key] for key in keys if key in self._values}

        return next(iter(self._wait(there, keys, timeout_s, what).items()))

    def delete(self, keys: Sequence[str]) -> None:
        with self._changed:
            for key in keys:
                self._values.pop(key, None)

    def announce(self, topic: str, value: int) -> None:
        assert value >= 0, f"progress is never negative, got {value}"
        with self._changed:
            self._progress[topic] = max(value, self._progress.get(topic, 0))
            self._changed.notify_all()

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        with self._changed:
            return {topic: self._progress[topic] for topic in topics if topic in self._progress}

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        def reached() -> dict[str, int]:
            return {topic: at for topic, at in self._progress.items() if at >= goals.get(topic, math.inf)}

        return self._wait(reached, list(goals), timeout_s, what)

    def _wait[V](self, ready: Callable[[], dict[str, V]], names: Sequence[str], timeout_s: float, what: str):
        assert names and 0 < timeout_s < math.inf, "a wait needs a key or topic and a deadline"
        with self._changed:
            if not self._changed.wait_for(ready, timeout_s):
                raise StoreTimeoutError(
                    f"waited {timeout_s:g} s for {what}, and none of these came: {', '.join(names)}"
                )
            return ready()
