"""The plan store on a Redis or Valkey server: bytes under keys, progress under topics, waits with deadlines.

Plans are small (up to some hundred kB), written once and read by several ranks: a key is published once and then only
read or deleted. How far training has come is a *progress* topic: a number that only grows. Both can be waited for.

A key is a stream of one entry: the server itself refuses a second entry of the same id, which makes publishing
atomic, and `XREAD BLOCK` waits for the first of several streams without taking anything away, so many readers share a
plan. A progress topic is a stream of one entry as well, whose *id* is the progress: the server keeps ids growing and
wakes exactly those readers whose goal is reached.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from redis.exceptions import ResponseError

from megatron_dynapipe.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.store.address import StoreAddress, job_prefix
from megatron_dynapipe.store.connection import REPLY_BYTES, Command, Connections

logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 256_000_000
"""Largest value a store takes; Redis refuses strings above 512 MiB, and a plan is a thousandth of this."""
REPLY_TIMEOUT_S = 300.0
"""How long a request that does not block may take where the caller does not say; a run passes its own deadline."""
RETENTION_S = 2 * 3600
"""Entries that nobody renews or deletes (their job was killed) leave a shared server after this time."""
COMMANDS = "-@all +ping +select +xadd +xread +unlink +expire +scan +info"
"""What a user of the server needs, as its ACL says it; with the keys `keys.PATTERN`."""
_BATCH = 256
"""Values in one request: a large iteration is published in a few."""
_GRACE_S = 3.0  # on a busy machine, between the server's own end of a blocking read and the socket's
_ENTRY_ID = "1-1"
_FIELD = b"v"
_TAKEN = "equal or smaller than the target stream top item"  # the same words in every Redis and Valkey
_RENEWALS = 24
"""Renewals in the time that a key is kept for: some may fail."""
_STOP_TIMEOUT_S = 5.0


class PlanStore(Connections):
    """Bytes under keys and progress under topics. Safe to use from several threads. Also a context manager.

    Every method raises `StoreError` when the server cannot be reached or refuses the request, `StoreFullError` when it
    has no memory left.

    Attributes:
        retention_s: seconds after which an entry that nobody renewed disappears; None keeps all.
    """

    def __init__(
        self,
        address: StoreAddress | str,
        *,
        retention_s: int | None = RETENTION_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        patience_s: float = 0.0,
        is_known: bool = False,
    ) -> None:
        """Connect as `Connections` does; `address` may be a URL, `retention_s` is None on a job's own server."""
        self.retention_s = retention_s
        super().__init__(
            address if isinstance(address, StoreAddress) else StoreAddress(address),
            reply_timeout_s=reply_timeout_s,
            patience_s=patience_s,
            is_known=is_known,
        )

    def put(self, key: str, value: bytes) -> None:
        """Publish `value` under `key`, all at once; publishing equal bytes again does nothing.

        Raises `StoreError` when the key holds other bytes: two writers disagree about a plan.
        """
        held = self.put_first(key, value)
        if held != value:
            raise conflict_error(key, len(held), len(value))

    def put_first(self, key: str, value: bytes) -> bytes:
        """Publish `value` unless the key is taken; what the key holds: the first writer wins."""
        check_value(key, value)
        while not self._append(f"publishing {key}", key, _ENTRY_ID, value):
            _, held = self._read({key: "0-0"}, f"reading back {key}").get(key, (0, None))
            if held is not None:  # else it has gone meanwhile: deleted, or the server has come back empty
                return held
        return value

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Publish several keys as `put` does, in few requests; one after another, so that the last is last."""
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            commands: list[Command] = []
            for key, value in batch:
                check_value(key, value)
                commands += self._appending(key, _ENTRY_ID, value)
            doing = f"publishing {batch[0][0]} and {len(batch) - 1} more"
            replies = self.exchange(doing, commands)
            per_value = len(commands) // len(batch)
            for (key, value), added in zip(batch, replies[::per_value], strict=True):
                if isinstance(added, ResponseError) and _TAKEN in str(added):
                    self.put(key, value)
                else:
                    self.refuse(doing, added)

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:
        """Block until one of `keys` exists; that key (the first in order, if several do) and its value.

        The value stays for other readers. `what` names what is awaited, for the error of a wait in vain.
        """
        found = self._wait(dict.fromkeys(keys, "0-0"), timeout_s, what)
        key = next(key for key in keys if key in found)
        return key, found[key][1]

    def delete(self, keys: Sequence[str]) -> None:
        """Forget these keys; those that do not exist are no error."""
        if keys:
            self.request(f"deleting {len(keys)} keys", "UNLINK", *keys)

    def announce(self, topic: str, value: int) -> None:
        """Raise the progress of `topic` to `value` (≥ 0) and wake its waiters; a smaller value changes nothing."""
        assert value >= 0, f"progress is never negative, got {value}"
        self._append(f"announcing {topic} = {value}", topic, f"{value}-1", b"")

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        """Progress of those topics that have any, at this moment."""
        found = self._read(dict.fromkeys(topics, "0-0"), "reading progress") if topics else {}
        return {topic: progress for topic, (progress, _) in found.items()}

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        """Block until the progress of at least one topic has reached its goal; progress of all that have."""
        found = self._wait({topic: f"{goal}-0" for topic, goal in goals.items()}, timeout_s, what)
        return {topic: progress for topic, (progress, _) in found.items()}

    def renew(self, job: str) -> int:
        """Let every key of a job live for another retention; their number."""
        assert self.retention_s is not None, "nothing expires"
        lifetime_s = self.retention_s
        return self._for_each(job, "renewing", lambda key: ("EXPIRE", key, lifetime_s))

    def delete_job(self, job: str) -> int:
        """Forget every key of a job; their number."""
        return self._for_each(job, "deleting", lambda key: ("UNLINK", key))

    def eviction_warning(self) -> str | None:
        """What to say of a server that may drop plans when its memory is full; None of one that does not."""
        policy = self.info("memory").get("maxmemory_policy", "unknown")
        if policy == "noeviction":
            return None
        return (
            f"plan store {self.address} has the maxmemory-policy {policy}: it may drop plans that ranks wait "
            "for; set it to noeviction"
        )

    def _append(self, doing: str, key: str, entry_id: str, value: bytes) -> bool:
        """Make `entry_id` the stream's one entry; False if it has one of this id or a larger one."""
        added, *others = self.exchange(doing, self._appending(key, entry_id, value))
        if isinstance(added, ResponseError) and _TAKEN in str(added):
            return False
        self.refuse(doing, added, *others)
        return True

    def _appending(self, key: str, entry_id: str, value: bytes) -> list[Command]:
        commands: list[Command] = [("XADD", key, "MAXLEN", 1, entry_id, _FIELD, value)]
        if self.retention_s is not None:
            commands.append(("EXPIRE", key, self.retention_s))
        return commands

    def _read(self, after: Mapping[str, str], doing: str) -> dict[str, tuple[int, bytes]]:
        """(first half of its id, value) of the newest entry of each stream that has one beyond the id in `after`."""
        reply = self.request(
            doing, "XREAD", "COUNT", 1, "STREAMS", *after, *after.values(), reply_bytes=_reply_bytes(after)
        )
        return _entries(reply, doing)

    def _wait(self, after: Mapping[str, str], timeout_s: float, what: str) -> dict[str, tuple[int, bytes]]:
        """What `_read` returns; blocks until there is one."""
        check_wait(list(after), timeout_s)

        def reading(milliseconds: int) -> Command:
            return ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *after, *after.values())

        doing = f"waiting for {what}"
        reply = self.block(doing, reading, timeout_s, grace_s=_GRACE_S, reply_bytes=_reply_bytes(after))
        if reply is None:
            raise timeout_error(what, list(after), timeout_s)
        return _entries(reply, doing)

    def _for_each(self, job: str, doing: str, command: Callable[[bytes], Command]) -> int:
        """Send a command for every key of a job."""
        number = 0
        for found in self.scan(f"{doing} the keys of job {job}", f"{job_prefix(job)}*"):
            self.refuse(f"{doing} keys", *self.exchange(f"{doing} keys", map(command, found)))
            number += len(found)
        return number


open_store = PlanStore
"""Connects to a store; a context manager."""


def timeout_error(what: str, awaited: Sequence[str], timeout_s: float) -> StoreTimeoutError:
    """The error of every wait whose deadline passed."""
    return StoreTimeoutError(
        f"waited {timeout_s:g} s for {what}, and none of these came: {', '.join(awaited)}",
        hint="look at the planner's log: it may have died, be slower than training, or run under other settings; "
        "on a server that others share the key may have expired, or been evicted (maxmemory-policy must be noeviction)",
    )


def conflict_error(key: str, held: int, offered: int) -> StoreError:
    """The error of publishing other bytes under a key that is taken (sizes in bytes)."""
    return StoreError(
        f"key {key} already holds other bytes ({held} B) than those now published ({offered} B)",
        hint="two planners under one job name disagree: give every launch a job name of its own",
    )


def check_value(key: str, value: bytes) -> None:
    """Refuse a value too large for any store."""
    if len(value) > MAX_VALUE_BYTES:
        raise StoreError(f"value of key {key} is {len(value)} B, above the limit of {MAX_VALUE_BYTES} B")


def check_wait(awaited: Sequence[str], timeout_s: float) -> None:
    """Our own invariant: a wait waits for something, for a positive and finite time."""
    assert awaited, "a wait needs at least one key or topic"
    assert 0 < timeout_s < float("inf"), f"a wait needs a positive, finite deadline, got {timeout_s}"


def _reply_bytes(streams: Mapping[str, str]) -> int:
    return REPLY_BYTES + len(streams) * MAX_VALUE_BYTES


def _entries(reply: Any, doing: str) -> dict[str, tuple[int, bytes]]:
    """What `XREAD` answers, [[stream, [[id, [field, value]]]], …], by stream."""
    try:
        return {
            stream.decode(): (int(entry_id.partition(b"-")[0]), cast(bytes, value))
            for stream, ((entry_id, (_, value)), *_) in reply or []
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"expected entries of streams while {doing}, got another reply",
            hint="the server must be Redis or Valkey, 6.2 or newer",
        ) from error


@contextlib.contextmanager
def repeated(action: Callable[[], object], interval_s: float, name: str) -> Iterator[None]:
    """Do something from time to time in a thread of its own, for as long as the block lasts."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(interval_s):
            action()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_STOP_TIMEOUT_S)


@contextlib.contextmanager
def renewed_keys(store: PlanStore, job: str, *, interval_s: float | None = None) -> Iterator[None]:
    """In one process of a job on a shared server: renews the job's keys; a clean end of the block deletes them.

    Where that process is killed nothing is renewed any more, and the keys expire after the store's retention. After an
    error in the block they are left to expire, too: another rank may have to read what went wrong.
    """
    assert store.retention_s is not None, "nothing expires"

    def renew() -> None:
        try:
            store.renew(job)
        except StoreError as problem:
            logger.warning("cannot renew this job's keys in the plan store: %s", problem)

    with repeated(renew, interval_s or store.retention_s / _RENEWALS, "dynapipe-renewal"):
        yield
    try:
        store.delete_job(job)
    except StoreError as problem:
        logger.warning("cannot delete this job's keys, which expire by themselves: %s", problem)
