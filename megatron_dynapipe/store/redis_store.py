"""The plan store on a Redis or Valkey server.

A key is a stream of one entry: the server itself refuses a second entry of the same id, which makes publishing
atomic, and `XREAD BLOCK` waits for the first of several streams without taking anything away, so many readers share a
plan. A progress topic is a stream of one entry as well, whose *id* is the progress: the server keeps ids growing and
wakes exactly those readers whose goal is reached.

A lost connection is opened again, and the request sent again, for as long as the store's `patience_s`: every request
may be sent twice. After that, or at once without patience, a server that is gone shows as a `StoreError` on every
reader; one that hangs shows when the caller's deadline passes.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from megatron_dynapipe.errors import StoreError, StoreFullError
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.keys import LEASE_SUFFIX, job_prefix
from megatron_dynapipe.store.kind import check_kind, fields_of
from megatron_dynapipe.store.protocol import check_value, check_wait, conflict_error, timeout_error

REPLY_TIMEOUT_S = 300.0
"""How long a request that does not block may take where the caller does not say; a run passes its own deadline."""
CONNECT_TIMEOUT_S = 5.0
RETENTION_S = 2 * 3600
"""Entries that nobody renews or deletes (their job was killed) leave a shared server after this time."""
_SCAN_COUNT = 1000
_BATCH = 256
"""Values in one request: a large iteration is published in a few."""
_RECONNECT_S = 0.25
_ATTEMPT_S = CONNECT_TIMEOUT_S + 1.0
"""How long an attempt to connect lasts at most, with the pause before it."""

_GRACE_S = 3.0  # on a busy machine, between the server's own end of a blocking read and the socket's
_ENTRY_ID = "1-1"
_FIELD = b"v"
_POLICY = b"maxmemory_policy:"
_TAKEN = "equal or smaller than the target stream top item"  # the same words in every Redis and Valkey

type Command = tuple[str | bytes | int, ...]


class RedisStore:
    """A `PlanStore` on a server; one pooled connection per thread that is using it. Also a context manager."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        retention_s: int | None = RETENTION_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        patience_s: float = 0.0,
        is_known: bool = False,
    ) -> None:
        """Connect and greet the server, so that a wrong address or password fails here.

        Args:
            address: where the server is.
            retention_s: seconds after which an entry that nobody renewed or deleted disappears; None keeps all, on a
                server that ends with its job.
            reply_timeout_s: a server that takes longer for a request that does not block is taken for dead.
            patience_s: how long a server that is gone may take to come back.
            is_known: whether the address has served before, so that the first connection has this patience too.

        Raises:
            StoreError: the server cannot be reached, refuses the password, or is one that cannot serve plans (`kind`).
        """
        self.address = address
        self.retention_s = retention_s
        self._reply_timeout_s = reply_timeout_s
        self._patience_s = patience_s if is_known else 0.0  # a wrong address, at which nobody listens, shows at once
        self._closed = threading.Event()
        self.interruptions = 0
        self._server = ""
        self._busy: set[Any] = set()
        self._pool = redis.ConnectionPool.from_url(
            address.url,
            protocol=2,
            socket_timeout=reply_timeout_s,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._greet,
        )
        self._call("greeting the server", ("PING",))
        self._patience_s = patience_s

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        if self.put_first(key, value):
            return
        held = self._call(f"reading back {key}", ("XRANGE", key, "-", "+", "COUNT", 1))
        held_value = _value(held[0]) if held else b""
        if held_value != value:
            raise conflict_error(key, len(held_value), len(value))

    def put_first(self, key: str, value: bytes) -> bool:
        """See `PlanStore.put_first`."""
        check_value(key, value)
        return self._append(f"publishing {key}", key, _ENTRY_ID, value)

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        """See `PlanStore.put_all`."""
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            commands: list[Command] = []
            for key, value in batch:
                check_value(key, value)
                commands += self._appending(key, _ENTRY_ID, value)
            doing = f"publishing {batch[0][0]} and {len(batch) - 1} more"
            replies = self._exchange(doing, commands, self._reply_timeout_s)
            per_value = len(commands) // len(batch)
            for (key, value), added in zip(batch, replies[::per_value], strict=True):
                if isinstance(added, ResponseError) and _TAKEN in str(added):
                    self.put(key, value)
                else:
                    self._refuse(doing, added)

    def put_latest(self, key: str, value: bytes) -> None:
        """See `PlanStore.put_latest`."""
        lasts = () if self.retention_s is None else ("EX", self.retention_s)
        self._call(f"reporting {key}", ("SET", key, value, *lasts))

    def read_latest(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `PlanStore.read_latest`."""
        return cast(list[bytes | None], self._call("reading reports", ("MGET", *keys))) if keys else []

    def claim(self, key: str, owner: bytes, *, lease_s: float) -> bool:
        """See `PlanStore.claim`."""
        lease = ("SET", key, owner, "NX", "PX", math.ceil(lease_s * 1000))
        taken, holder = self._exchange(f"claiming {key}", [lease, ("GET", key)], self._reply_timeout_s)
        self._refuse(f"claiming {key}", taken, holder)
        return taken is not None or holder == owner

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:
        """See `PlanStore.wait_any`."""
        found = self._wait(dict.fromkeys(keys, "0-0"), timeout_s, what)
        key = next(key for key in keys if key in found)
        return key, _value(found[key])

    def delete(self, keys: Sequence[str]) -> None:
        """See `PlanStore.delete`."""
        if keys:
            self._call(f"deleting {len(keys)} keys", ("UNLINK", *keys))

    def announce(self, topic: str, value: int) -> None:
        """See `PlanStore.announce`."""
        assert value >= 0, f"progress is never negative, got {value}"
        self._append(f"announcing {topic} = {value}", topic, f"{value}-1", b"")

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        """See `PlanStore.read_progress`."""
        streams = list(topics)
        reply = self._call("reading progress", ("XREAD", "COUNT", 1, "STREAMS", *streams, *["0-0"] * len(streams)))
        found = {stream.decode(): entries[0] for stream, entries in cast(list[Any], reply or [])}
        return {topic: int(entry[0].partition(b"-")[0]) for topic, entry in found.items()}

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        """See `PlanStore.wait_progress`."""
        found = self._wait({topic: f"{goal}-0" for topic, goal in goals.items()}, timeout_s, what)
        return {topic: int(entry[0].partition(b"-")[0]) for topic, entry in found.items()}

    def renew(self, job: str) -> int:
        """Let every key of a job but its leases live for another retention; their number."""
        assert self.retention_s is not None, "nothing expires"
        lease = LEASE_SUFFIX.encode()
        return self._for_each(
            job, "renewing", lambda key: None if key.endswith(lease) else ("EXPIRE", key, cast(int, self.retention_s))
        )

    def delete_job(self, job: str) -> int:
        """Forget every key of a job; their number."""
        return self._for_each(job, "deleting", lambda key: ("UNLINK", key))

    def eviction_warning(self) -> str | None:
        """What to tell the user of a server that may drop plans when its memory is full; None of one that does not."""
        memory: bytes = self._call("asking for its policy", ("INFO", "memory"))
        policy = next((line.partition(b":")[2] for line in memory.splitlines() if line.startswith(_POLICY)), b"unknown")
        if policy == b"noeviction":
            return None
        return (
            f"plan store {self.address.redacted} has the maxmemory-policy {policy.decode(errors='replace')}: it may "
            "drop plans that ranks wait for; set it to noeviction"
        )

    def close(self) -> None:
        """See `PlanStore.close`."""
        self._closed.set()
        for connection in list(self._busy):
            # Only shut down, so that its thread wakes and closes it: closed here, its descriptor could be reused there.
            if (link := connection._get_socket()) is not None:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        self._pool.disconnect(inuse_connections=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self, connection: Any) -> None:
        """On every new connection, which the pool may open unnoticed: is it the server that it was?"""
        connection.on_connect()
        connection.send_command("INFO", "server")
        info = self._reply(connection, self._reply_timeout_s)
        if not isinstance(info, bytes):
            return  # this user is refused the question
        fields = fields_of(info.decode(errors="replace"))
        check_kind(self.address, fields)
        self.interruptions += self._server not in ("", fields.get("run_id", ""))
        self._server = fields.get("run_id", "")

    def _append(self, doing: str, key: str, entry_id: str, value: bytes) -> bool:
        """Make `entry_id` the stream's one entry; False if it has one of this id or a larger one."""
        commands = self._appending(key, entry_id, value)
        added, *others = self._exchange(doing, commands, self._reply_timeout_s)
        if isinstance(added, ResponseError) and _TAKEN in str(added):
            return False
        self._refuse(doing, added, *others)
        return True

    def _appending(self, key: str, entry_id: str, value: bytes) -> list[Command]:
        commands: list[Command] = [("XADD", key, "MAXLEN", 1, entry_id, _FIELD, value)]
        if self.retention_s is not None:
            commands.append(("EXPIRE", key, self.retention_s))
        return commands

    def _wait(self, after: Mapping[str, str], timeout_s: float, what: str) -> dict[str, list[Any]]:
        """The newest entry of each stream that has one beyond the id in `after`; blocks until one has."""
        streams = list(after)
        check_wait(streams, timeout_s)
        started = time.monotonic()

        def wait_once(connection: Any) -> list[Any]:
            left_s = max(started + timeout_s - time.monotonic(), 0.001)
            milliseconds = math.ceil(left_s * 1000)
            block: Command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *streams, *after.values())
            return self._send(connection, [block], left_s + _GRACE_S)

        (reply,) = self._patiently(f"waiting for {what}", wait_once, timeout_s + self._patience_s, may_stall=True)
        self._refuse(f"waiting for {what} ({time.monotonic() - started:.1f} s so far)", reply)
        if reply is None:
            raise timeout_error(what, streams, timeout_s)
        return {stream.decode(): entries[0] for stream, entries in cast(list[Any], reply)}

    def _for_each(self, job: str, doing: str, command: Callable[[bytes], Command | None]) -> int:
        """Send a command for every key of a job."""
        cursor, number = b"0", 0
        while True:
            scan: Command = ("SCAN", cursor, "MATCH", f"{job_prefix(job)}*", "COUNT", _SCAN_COUNT)
            cursor, found = self._call(f"{doing} the keys of job {job}", scan)
            if found:
                commands = [each for key in found if (each := command(key)) is not None]
                replies = self._exchange(f"{doing} keys", commands, self._reply_timeout_s)
                self._refuse(f"{doing} keys", *replies)
                number += len(commands)
            if cursor == b"0":
                return number

    def _call(self, doing: str, command: Command) -> Any:
        (reply,) = self._exchange(doing, [command], self._reply_timeout_s)
        self._refuse(doing, reply)
        return reply

    def _exchange(self, doing: str, commands: Iterable[Command], timeout_s: float) -> list[Any]:
        """Send commands in one go and read a reply each; a refusal is a reply, of type `ResponseError`."""
        whole, limit_s = list(commands), timeout_s + self._patience_s
        return self._patiently(doing, lambda connection: self._send(connection, whole, timeout_s), limit_s)

    def _patiently(
        self, doing: str, send: Callable[[Any], list[Any]], limit_s: float, *, may_stall: bool = False
    ) -> list[Any]:
        """Send again where the connection is lost, until the server has been out of reach for the store's patience.

        A server that can be reached, and lost again, is tried for `limit_s`. Time in which this process was stopped is
        no time in which it found nobody: of one attempt, only as much counts as it can last. With `may_stall` a server
        that does not answer counts as out of reach for as long: the request's own time may be shorter than a stop.
        """
        last, tried, away_s = math.inf, time.monotonic(), 0.0
        while True:
            is_reached = False
            try:
                connection = self._pool.get_connection()
                is_reached = True
                return send(connection)
            except (RedisError, OSError) as error:
                self._check_open()
                now = time.monotonic()
                last = min(last, now + limit_s)
                stalls = may_stall and _is_unanswered(error)
                longest_s = self._reply_timeout_s if stalls else _ATTEMPT_S
                away_s = 0.0 if is_reached and not stalls else away_s + min(now - tried, longest_s)
                tried = now
                may_come_back = stalls or _may_come_back(error)
                if not may_come_back or away_s + _RECONNECT_S > self._patience_s or now > last:
                    raise self._error(doing, error) from error
            self.interruptions += 1
            self._closed.wait(_RECONNECT_S)

    def _send(self, connection: Any, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        self._busy.add(connection)
        try:
            self._check_open()
            connection.send_packed_command(connection.pack_commands(commands))
            return [self._reply(connection, timeout_s) for _ in commands]
        except BaseException:
            connection.disconnect()  # a reply may still be under way: nobody must read it as theirs
            raise
        finally:
            self._busy.discard(connection)
            self._pool.release(connection)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreError("this plan store is closed", hint="open a new one with open_store()")

    @staticmethod
    def _reply(connection: Any, timeout_s: float) -> Any:
        try:
            return connection.read_response(timeout=timeout_s)
        except ResponseError as refusal:
            return refusal

    def _refuse(self, doing: str, *replies: Any) -> None:
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise self._error(doing, reply) from reply

    def _error(self, doing: str, cause: Exception) -> StoreError:
        kind = StoreFullError if isinstance(cause, OutOfMemoryError) else StoreError
        return kind(f"plan store {self.address.redacted} failed while {doing}: {cause}", hint=_hint(cause))


def open_store(
    address: StoreAddress | str,
    *,
    retention_s: int | None = RETENTION_S,
    reply_timeout_s: float = REPLY_TIMEOUT_S,
    patience_s: float = 0.0,
    is_known: bool = False,
) -> RedisStore:
    """Connect as `RedisStore` does; raises `StoreError` when it cannot be reached or refuses the password."""
    return RedisStore(
        address if isinstance(address, StoreAddress) else StoreAddress(address),
        retention_s=retention_s,
        reply_timeout_s=reply_timeout_s,
        patience_s=patience_s,
        is_known=is_known,
    )


def _may_come_back(error: Exception) -> bool:
    """Whether a server may be starting again, or a link be cut for a while."""
    if isinstance(error, redis.TimeoutError):
        return not _is_unanswered(error)  # one that takes requests and does not answer has had its time
    return isinstance(error, redis.ConnectionError | OSError) and not isinstance(error, AuthenticationError)


def _is_unanswered(error: Exception) -> bool:
    """Whether a server took a request, or a connection, and then said nothing."""
    return isinstance(error, redis.TimeoutError) and "connecting" not in str(error)


def _value(entry: Sequence[Any]) -> bytes:
    """The value of a stream's entry `[id, [field, value]]`."""
    return cast(bytes, entry[1][1])


def _hint(cause: Exception) -> str:
    if isinstance(cause, AuthenticationError | NoPermissionError):
        return "check user and password in the store's URL"
    if isinstance(cause, OutOfMemoryError):
        return "the server's memory limit is reached: plan fewer iterations ahead, or raise its maxmemory"
    if isinstance(cause, ResponseError):
        return "the server must be Redis or Valkey, 6.2 or newer, and its dynapipe:… keys are not for other programs"
    if "certificate verify failed" in str(cause) or "CERTIFICATE_VERIFY_FAILED" in str(cause):
        return "the server's certificate must be one of an authority that this machine trusts, or of SSL_CERT_FILE"
    if isinstance(cause, redis.TimeoutError):
        return "the server accepts connections but does not answer: is its machine overloaded or stopped?"
    return "is the server running, and can this machine reach it? Its log says why it ended"
