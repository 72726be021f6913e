"""A rank's end of the store: its plans, or what went wrong in a planner; and what it publishes for planners itself."""

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import msgspec

from megatron_dynapipe.errors import (
    DynaPipeError,
    PlanError,
    PlannerFailedError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
)
from megatron_dynapipe.plan.codec import decode_entry
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.store import PlanKeys, PlanStore
from megatron_dynapipe.store.redis_store import repeated

logger = logging.getLogger(__name__)


class PlannerFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What went wrong in a planner process: a line for the reader, the next step, and every detail.

    Attributes:
        planner: which of the job's planners it was.
        doing: what it was doing, as in "planning iteration 7 of train".
        error: type and message of the error, or how the process ended.
        hint: the next step, if known.
        details: the traceback, or the last lines that the process printed.
    """

    planner: int
    doing: str
    error: str
    hint: str | None
    details: str

    @classmethod
    def of(cls, error: BaseException, *, planner: int, doing: str) -> "PlannerFailure":
        """Describe an exception that is being handled."""
        return cls(
            planner=planner,
            doing=doing,
            error=f"{type(error).__name__}: {error.message if isinstance(error, DynaPipeError) else error}",
            hint=error.hint if isinstance(error, DynaPipeError) else None,
            details="".join(traceback.format_exception(error)).rstrip(),
        )

    def encode(self) -> bytes:
        """Bytes for the store's error key."""
        return msgspec.json.encode(self)

    @property
    def summary(self) -> str:
        """What went wrong, without the details."""
        return f"planner {self.planner} failed while {self.doing}: {self.error}"

    def to_error(self) -> PlannerFailedError:
        """The error that every rank raises."""
        return PlannerFailedError(
            f"{self.summary}\n--- from its process ---\n{self.details}\n---",
            hint=self.hint,
        )


def decode_failure(data: bytes) -> PlannerFailure:
    """What `PlannerFailure.encode` wrote; whatever else lies under the error key is shown as it is."""
    try:
        return msgspec.json.decode(data, type=PlannerFailure)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return PlannerFailure(
            planner=-1,
            doing="running a version of this package that reports failures in another form",
            error="unknown",
            hint="install the same version on every node",
            details=data.decode(errors="replace"),
        )


def publish_failure(store: PlanStore, keys: PlanKeys, failure: PlannerFailure) -> None:
    """Publish a failure for all ranks, unless one was before; a store that is gone shows on every rank by itself."""
    try:
        store.put_first(keys.error, failure.encode())
    except StoreError as error:
        logger.warning("cannot publish what went wrong: %s", error)


_FULL_S = 0.1
REPUBLISH_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class PlanClient:
    """Fetches the plans of one (replica, stage). Safe to use from several threads.

    Attributes:
        store: where plans come from.
        keys: names of this job's plans.
        replica: data-parallel replica of this rank.
        stage: pipeline stage of this rank.
        deadline_s: how long one plan is waited for.
        late_s: after how much of that a plan is late.
        on_late: called then; the wait goes on.
    """

    store: PlanStore
    keys: PlanKeys
    _: KW_ONLY
    replica: int
    stage: int
    deadline_s: float
    late_s: float = float("inf")
    on_late: Callable[[], None] = lambda: None

    def fetch(self, split: str, iteration: int) -> StageEntry:
        """Share of this rank in `iteration`; blocks until it is there.

        Plans published before a planner failed are still handed out.

        Raises:
            PlannerFailedError: a planner failed; its traceback is in the message.
            StoreTimeoutError: neither plan nor failure came within the deadline.
            StoreError: the store is gone.
            PlanError: what came is not this plan.
        """
        key = self.keys.plan(split=split, iteration=iteration, replica=self.replica, stage=self.stage)
        what = f"the plan of iteration {iteration} of {split} for replica {self.replica}, stage {self.stage}"
        found, data = self._await([key, self.keys.error], what)
        if found != key:
            raise decode_failure(data).to_error()
        entry = decode_entry(data)
        expected = (iteration, self.replica, self.stage)
        if (actual := (entry.iteration, entry.replica, entry.stage_plan.stage)) != expected:
            raise PlanError(f"expected the plan of (iteration, replica, stage) {expected} under {key}, got {actual}")
        return entry

    def _await(self, keys: list[str], what: str) -> tuple[str, bytes]:
        """One of the keys, and what is there."""
        left_s = self.deadline_s
        if self.late_s < left_s:
            try:
                return self.store.wait_any(keys, timeout_s=self.late_s, what=what)
            except StoreTimeoutError:
                self.on_late()
                left_s -= self.late_s
        return self.store.wait_any(keys, timeout_s=left_s, what=what)

    def announce(self, split: str, iteration: int) -> None:
        """Tell the planners that training has begun `iteration`; called by rank 0 alone."""
        given_up = time.monotonic() + self.deadline_s
        while True:
            try:
                return self.store.announce(self.keys.progress(split), iteration)
            except StoreFullError:  # a planner that finds it full deletes its last plans again
                if time.monotonic() > given_up:
                    raise
                time.sleep(_FULL_S)


class Republisher:
    """Context manager on a rank: publishes what the rank has published again, where the store has come back empty.

    Plans are the planners' to publish again. A job's progress and the passes that ranks measured are not theirs:
    without them a planner that starts anew begins at the wrong iteration, or waits for passes that nobody sends again.

    Args:
        store: where it was published.
        topic: any topic of the job, which is read by a rank that has published nothing, too.
        interval_s: between two readings.
    """

    def __init__(self, store: PlanStore, topic: str, *, interval_s: float = REPUBLISH_INTERVAL_S) -> None:
        self._store = store
        self._topic = topic
        self._interval_s = interval_s
        self._values: dict[str, bytes] = {}
        self._progress: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._watch = repeated(self._look, self._interval_s, "dynapipe-republish")
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

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
        """Publish everything again if some of it is gone; how many keys. Raises StoreError."""
        with self._lock:
            values, progress = dict(self._values), dict(self._progress)
        own = {*list(values)[:1], *progress}  # values may be large; a store that was lost has lost the oldest
        if self._store.read_progress([*own, self._topic]).keys() >= own:  # never nothing: that keeps the connection
            return 0
        for key, value in values.items():
            self._store.put(key, value)
        for topic, reached in progress.items():
            self._store.announce(topic, reached)
        return len(values) + len(progress)

    def _look(self) -> None:
        try:
            if count := self.restore():
                logger.info("the store has lost keys: published %d of this rank again", count)
        except StoreError as error:  # full, or gone: whoever waits for a plan says so
            logger.info("cannot find out whether the store has lost keys: %s", error)
