"""The plan store on a Redis or Valkey server.

A key is a stream of one entry: the server itself refuses a second entry of the same id, which makes publishing
atomic, and `XREAD BLOCK` waits for the first of several streams without taking anything away, so many readers share a
plan. A progress topic is a stream of one entry as well, whose *id* is the progress: the server keeps ids growing and
wakes exactly those readers whose goal is reached.

No call is tried again behind the caller's back: a server that is gone shows at once, as a `StoreError`, on every
reader; one that hangs shows when the caller's deadline passes. The next call opens a new connection.
"""

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.protocol import check_value, check_wait, conflict_error, timeout_error

REPLY_TIMEOUT_S = 20.0
"""A server that takes longer than this for a request that does not block is taken for dead."""
CONNECT_TIMEOUT_S = 5.0
RETENTION_S = 24 * 3600
"""Entries nobody deleted (their planner was killed) leave a shared server after this time."""

_GRACE_S = 3.0  # on a busy machine, between the server's own end of a blocking read and the socket's
_ENTRY_ID = "1-1"
_FIELD = b"v"
_TAKEN = "equal or smaller than the target stream top item"  # the same words in every Redis and Valkey

type Command = tuple[str | bytes | int, ...]


class RedisStore:
    """A `PlanStore` on a server; one pooled connection per thread that is using it. Also a context manager."""

    def __init__(self, address: StoreAddress, *, retention_s: int = RETENTION_S) -> None:
        """Connect and greet the server, so that a wrong address or password is told here.

        Args:
            address: where the server is.
            retention_s: seconds after which an entry that nobody deleted disappears.
        """
        self.address = address
        self._retention_s = retention_s
        self._closed = False
        self._busy: set[Any] = set()
        self._pool = redis.ConnectionPool.from_url(
            address.url,
            protocol=2,
            socket_timeout=REPLY_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._call("greeting the server", ("PING",))

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

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        """See `PlanStore.wait_progress`."""
        found = self._wait({topic: f"{goal}-0" for topic, goal in goals.items()}, timeout_s, what)
        return {topic: int(entry[0].partition(b"-")[0]) for topic, entry in found.items()}

    def close(self) -> None:
        """See `PlanStore.close`."""
        self._closed = True
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

    def _append(self, doing: str, key: str, entry_id: str, value: bytes) -> bool:
        """Make `entry_id` the stream's one entry; False if it has one of this id or a larger one."""
        added, expires = self._exchange(
            doing,
            [("XADD", key, "MAXLEN", 1, entry_id, _FIELD, value), ("EXPIRE", key, self._retention_s)],
            REPLY_TIMEOUT_S,
        )
        if isinstance(added, ResponseError) and _TAKEN in str(added):
            return False
        self._refuse(doing, added, expires)
        return True

    def _wait(self, after: Mapping[str, str], timeout_s: float, what: str) -> dict[str, list[Any]]:
        """The newest entry of each stream that has one beyond the id in `after`; blocks until one has."""
        streams = list(after)
        check_wait(streams, timeout_s)
        milliseconds = math.ceil(timeout_s * 1000)
        command: Command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *streams, *after.values())
        started = time.monotonic()
        (reply,) = self._exchange(f"waiting for {what}", [command], timeout_s + _GRACE_S)
        self._refuse(f"waiting for {what} ({time.monotonic() - started:.1f} s so far)", reply)
        if reply is None:
            raise timeout_error(what, streams, timeout_s)
        return {stream.decode(): entries[0] for stream, entries in cast(list[Any], reply)}

    def _call(self, doing: str, command: Command) -> Any:
        (reply,) = self._exchange(doing, [command], REPLY_TIMEOUT_S)
        self._refuse(doing, reply)
        return reply

    def _exchange(self, doing: str, commands: Iterable[Command], timeout_s: float) -> list[Any]:
        """Send commands in one go and read a reply each; a refusal is a reply, of type `ResponseError`."""
        try:
            connection: Any = self._pool.get_connection()
            self._busy.add(connection)
            try:
                self._check_open()
                packed = list(commands)
                connection.send_packed_command(connection.pack_commands(packed))
                return [self._reply(connection, timeout_s) for _ in packed]
            except BaseException:
                connection.disconnect()  # a reply may still be under way: nobody must read it as theirs
                raise
            finally:
                self._busy.discard(connection)
                self._pool.release(connection)
        except (RedisError, OSError) as error:
            self._check_open()
            raise self._error(doing, error) from error

    def _check_open(self) -> None:
        if self._closed:
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
        return StoreError(f"plan store {self.address.redacted} failed while {doing}: {cause}", hint=_hint(cause))


def open_store(address: StoreAddress | str, *, retention_s: int = RETENTION_S) -> RedisStore:
    """Connect to the server at `address`; raises `StoreError` when it cannot be reached or refuses the password."""
    return RedisStore(address if isinstance(address, StoreAddress) else StoreAddress(address), retention_s=retention_s)


def _value(entry: Sequence[Any]) -> bytes:
    """The value of a stream's entry `[id, [field, value]]`."""
    return cast(bytes, entry[1][1])


def _hint(cause: Exception) -> str:
    if isinstance(cause, AuthenticationError | NoPermissionError):
        return "check user and password in the store's URL"
    if isinstance(cause, OutOfMemoryError):
        return "the server's memory limit is reached: plan fewer iterations ahead, or raise its maxmemory"
    if isinstance(cause, ResponseError):
        return "the server must be Redis or Valkey, 5.0 or newer, and its dynapipe:… keys are not for other programs"
    if isinstance(cause, redis.TimeoutError):
        return "the server accepts connections but does not answer: is its machine overloaded or stopped?"
    return "is the server running, and can this machine reach it? Its log says why it ended"
