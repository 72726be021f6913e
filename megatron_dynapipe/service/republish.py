"""What a rank has told its planners, told again to a store that has come back empty.

Plans are the planners' to publish again. A job's progress and the passes that ranks measured are not theirs: without
them a planner that starts anew begins at the wrong iteration, or waits for passes that nobody sends again.
"""

import logging
import threading
from types import TracebackType
from typing import Self

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store import PlanStore

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Between two questions to the store."""
_STOP_TIMEOUT_S = 5.0


class Republisher:
    """Context manager on a rank: asks every few seconds whether the store was out of reach, and then tells it again.

    Args:
        store: where it is told.
        topic: what is asked for, any topic of the job.
        interval_s: between two questions.
    """

    def __init__(self, store: PlanStore, topic: str, *, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._topic = topic
        self._interval_s = interval_s
        self._interruptions = store.interruptions
        self._values: dict[str, bytes] = {}
        self._progress: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynapipe-republish", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def keep(self, key: str, value: bytes) -> None:
        """From now on `key` holds this value; it has been published."""
        with self._lock:
            self._values[key] = value

    def keep_progress(self, topic: str, value: int) -> None:
        """From now on a topic is this far; it has been announced."""
        with self._lock:
            self._progress[topic] = value

    def forget(self, key: str) -> None:
        """Nobody needs it any more."""
        with self._lock:
            self._values.pop(key, None)

    def restore(self) -> int:
        """Tell a store that was out of reach everything again; how many keys. Raises StoreError as the store does."""
        self._store.read_progress([self._topic])  # only who uses a connection learns that it is lost
        if (now := self._store.interruptions) == self._interruptions:
            return 0
        with self._lock:
            values, progress = dict(self._values), dict(self._progress)
        for key, value in values.items():
            self._store.put(key, value)
        for topic, reached in progress.items():
            self._store.announce(topic, reached)
        self._interruptions = now
        return len(values) + len(progress)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                if count := self.restore():
                    logger.info("the store was out of reach: published %d keys of this rank again", count)
            except StoreError as error:  # full, or gone: whoever waits for a plan says so
                logger.info("cannot ask whether the store was out of reach: %s", error)
