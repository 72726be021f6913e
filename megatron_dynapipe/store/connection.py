"""Requests to one Redis or Valkey server, each answered within a deadline or one `StoreError`.

A lost connection is opened again, and the request sent again, for as long as `patience_s`: every request may be sent
twice. After that, or at once without patience, a server that is gone shows as a `StoreError` on every reader; one that
hangs, or that sends more than was ever stored, shows when the reply's time or size is used up.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from megatron_dynapipe.errors import StoreError, StoreFullError
from megatron_dynapipe.store.address import StoreAddress

CONNECT_TIMEOUT_S = 5.0
OLDEST_REDIS = (6, 2)
REPLY_BYTES = 16_000_000
"""Largest reply to a request that asks for no values: some thousand keys."""
_SCAN_COUNT = 1000
_RECONNECT_S = 0.25
_ATTEMPT_S = CONNECT_TIMEOUT_S + 1.0
"""How long an attempt to connect lasts at most, with the pause before it."""
_MODES = {
    "cluster": ("a Redis Cluster", "keys of one plan would lie on several servers: give a server of its own"),
    "sentinel": ("a Redis Sentinel", "give the URL of the server that it watches"),
}

type Command = tuple[str | bytes | int, ...]


class Connections:
    """Pooled connections to a server, one per thread that is using it. Also a context manager.

    Attributes:
        address: where the server is.
        interruptions: how often the server was out of reach, or another one than before; it may have come back empty.
    """

    def __init__(
        self, address: StoreAddress, *, reply_timeout_s: float, patience_s: float = 0.0, is_known: bool = False
    ) -> None:
        """Connect and greet the server, so that a wrong address or password fails here.

        Args:
            address: where the server is.
            reply_timeout_s: a server that takes longer for a whole reply is taken for dead.
            patience_s: how long a server that is gone may take to come back.
            is_known: whether the address has served before, so that the first connection has this patience too.

        Raises:
            StoreError: the server cannot be reached, refuses the password, or is one that cannot serve plans.
        """
        self.address = address
        self.interruptions = 0
        self._reply_timeout_s = reply_timeout_s
        self._patience_s = patience_s if is_known else 0.0  # a wrong address, at which nobody listens, shows at once
        self._closed = threading.Event()
        self._run_id = ""
        self._busy: set[Any] = set()
        self._pool = redis.ConnectionPool.from_url(
            address.url,
            protocol=2,
            driver_info=None,
            socket_timeout=reply_timeout_s,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._greet,
        )
        self.request("greeting the server", "PING")
        self._patience_s = patience_s

    def request(self, doing: str, *command: str | bytes | int, reply_bytes: int = REPLY_BYTES) -> Any:
        """The reply to one command, in at most so many bytes; raises `StoreError` for a refusal, too."""
        (reply,) = self.exchange(doing, [command], reply_bytes=reply_bytes)
        self.refuse(doing, reply)
        return reply

    def exchange(self, doing: str, commands: Iterable[Command], *, reply_bytes: int = REPLY_BYTES) -> list[Any]:
        """Send commands in one go and read a reply each; a refusal is a reply, of type `ResponseError`."""
        whole, timeout_s = list(commands), self._reply_timeout_s
        limit_s = timeout_s + self._patience_s
        return self._patiently(doing, lambda link: self._send(link, whole, timeout_s, reply_bytes), limit_s)

    def block(
        self, doing: str, command: Callable[[int], Command], timeout_s: float, *, grace_s: float, reply_bytes: int
    ) -> Any:
        """The reply to a command that the server answers after a while; None where nothing came.

        Args:
            doing: what for, for the error.
            command: of the milliseconds that are left.
            timeout_s: how long the server may block.
            grace_s: how much later than that its answer may arrive.
            reply_bytes: the largest answer.
        """
        started = time.monotonic()

        def send(link: Any) -> list[Any]:
            left_s = max(started + timeout_s - time.monotonic(), 0.001)
            return self._send(link, [command(math.ceil(left_s * 1000))], left_s + grace_s, reply_bytes)

        while True:
            (reply,) = self._patiently(doing, send, timeout_s + self._patience_s, may_stall=True)
            self.refuse(f"{doing} ({time.monotonic() - started:.1f} s so far)", reply)
            if reply is not None or time.monotonic() >= started + timeout_s:  # else the server's clock has jumped
                return reply

    def scan(self, doing: str, pattern: str) -> Iterator[list[bytes]]:
        """All keys that match, in several lists."""
        cursor = b"0"
        while True:
            cursor, found = self.request(doing, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
            yield cast(list[bytes], found)
            if cursor == b"0":
                return

    def info(self, *section: str) -> dict[str, str]:
        """What the server says of itself, by name."""
        text: bytes = self.request("asking the server about itself", "INFO", *section)
        return fields_of(text.decode(errors="replace"))

    def refuse(self, doing: str, *replies: Any) -> None:
        """Raise the first refusal among some replies."""
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise self._error(doing, reply) from reply

    def close(self) -> None:
        """Let go of connections; requests in other threads end with `StoreError`."""
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
        connection._sock = link = _Bounded(connection._sock)
        try:
            link.allow(self._reply_timeout_s, REPLY_BYTES)
            connection.on_connect()
            connection.send_command("INFO", "server")
            info = _reply(connection, self._reply_timeout_s, REPLY_BYTES)
            fields = fields_of(info.decode(errors="replace")) if isinstance(info, bytes) else None
            check_kind(self.address, fields or {})
        except BaseException:
            connection.disconnect()
            raise
        if fields is None:
            return  # this user is refused the question
        self.interruptions += self._run_id not in ("", fields.get("run_id", ""))
        self._run_id = fields.get("run_id", "")

    def _patiently(
        self, doing: str, send: Callable[[Any], list[Any]], limit_s: float, *, may_stall: bool = False
    ) -> list[Any]:
        """Send again where the connection is lost, until the server has been out of reach for the patience.

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
            except (RedisError, OSError, RecursionError, ValueError) as error:
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

    def _send(self, connection: Any, commands: Sequence[Command], timeout_s: float, reply_bytes: int) -> list[Any]:
        self._busy.add(connection)
        try:
            self._check_open()
            connection.send_packed_command(connection.pack_commands(commands))
            return [_reply(connection, timeout_s, reply_bytes) for _ in commands]
        except BaseException:
            connection.disconnect()  # a reply may still be under way: nobody must read it as theirs
            raise
        finally:
            self._busy.discard(connection)
            self._pool.release(connection)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreError("this plan store is closed", hint="open a new one with open_store()")

    def _error(self, doing: str, cause: Exception) -> StoreError:
        kind = StoreFullError if isinstance(cause, OutOfMemoryError) else StoreError
        said = "a reply that is nested too deeply" if isinstance(cause, RecursionError) else cause
        return kind(f"plan store {self.address} failed while {doing}: {said}", hint=_hint(cause))


class _Bounded:
    """A socket on which a whole reply has so much time and so many bytes: redis-py counts time per receive."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self._end: float | None = None
        self._bytes_left = 0

    def allow(self, seconds: float | None, size: int = 0) -> None:
        """From now on, what is received takes so long and is so large at most; None for no bounds."""
        self._end = None if seconds is None else time.monotonic() + seconds
        self._bytes_left = size

    def recv(self, size: int) -> bytes:
        if self._end is None:
            return cast(bytes, self._link.recv(size))
        if (left_s := self._end - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._link.settimeout(left_s)
        data: bytes = self._link.recv(size)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise InvalidResponse("the reply is larger than anything that was stored")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def _reply(connection: Any, timeout_s: float, size: int) -> Any:
    """The next reply, or refusal."""
    link = connection._get_socket()
    link.allow(timeout_s, size)
    try:
        return connection.read_response(timeout=timeout_s)  # which sets the socket's own time again at its end
    except ResponseError as refusal:
        return refusal
    finally:
        link.allow(None)


def fields_of(info: str) -> dict[str, str]:
    """What a server answers to `INFO`, by name."""
    return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)


def check_kind(address: StoreAddress, fields: Mapping[str, str]) -> None:
    """Refuse a cluster, a sentinel, and a server that is too old.

    Raises:
        StoreError: names what the server is, and what to give instead.
    """
    mode = fields.get("server_mode") or fields.get("redis_mode", "")
    if mode in _MODES:
        name, hint = _MODES[mode]
        raise StoreError(f"expected a single Redis or Valkey server at {address}, got {name}", hint=hint)
    version = fields.get("redis_version", "")  # Valkey says 7.2 there, whatever its own
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
    if numbers and numbers < OLDEST_REDIS:
        raise StoreError(
            f"expected Redis 6.2 or newer, or Valkey, at {address}, got Redis {version}",
            hint="a run without a store's URL starts a server of its own",
        )


def _may_come_back(error: Exception) -> bool:
    """Whether a server may be starting again, or a link be cut for a while."""
    if isinstance(error, redis.TimeoutError):
        return not _is_unanswered(error)  # one that takes requests and does not answer has had its time
    return isinstance(error, redis.ConnectionError | OSError) and not isinstance(error, AuthenticationError)


def _is_unanswered(error: Exception) -> bool:
    """Whether a server took a request, or a connection, and then said nothing."""
    return isinstance(error, redis.TimeoutError) and "connecting" not in str(error)


def _hint(cause: Exception) -> str:
    if isinstance(cause, AuthenticationError | NoPermissionError):
        return "check user and password in the store's URL"
    if isinstance(cause, OutOfMemoryError):
        return "the server's memory limit is reached: plan fewer iterations ahead, or raise its maxmemory"
    if isinstance(cause, ResponseError | InvalidResponse | RecursionError | ValueError):
        return "the server must be Redis or Valkey, 6.2 or newer, and its dynapipe:… keys are not for other programs"
    if "certificate verify failed" in str(cause) or "CERTIFICATE_VERIFY_FAILED" in str(cause):
        return "the server's certificate must be one of an authority that this machine trusts, or of SSL_CERT_FILE"
    if isinstance(cause, redis.TimeoutError):
        return "the server accepts connections but does not answer: is its machine overloaded or stopped?"
    return "is the server running, and can this machine reach it? Its log says why it ended"
