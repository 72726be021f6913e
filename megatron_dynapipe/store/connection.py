"""Requests to one Redis or Valkey server, each answered within a deadline or one `StoreError`.

redis-py sends a request again where a connection is lost, a few times: every request may be sent twice. What it does
not have is here: a bound on a whole reply, in time and bytes, and errors that say what the server is and what to do.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from megatron_dynapipe.core.errors import StoreError, StoreFullError
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.protocol import REPLY_TIMEOUT_S

CONNECT_TIMEOUT_S = 5.0
OLDEST_REDIS = (6, 2)
MAX_VALUE_BYTES = 256_000_000
"""Largest value a store takes; Redis refuses strings above 512 MiB, and a plan is a thousandth of this."""
_REPLY_BYTES = 2 * MAX_VALUE_BYTES + 16_000_000
"""Largest reply: two values, and what names them."""
_RETRIES = 4
"""Attempts to restore a lost connection, in two and a half seconds."""
_MODES = {
    "cluster": ("a Redis Cluster", "keys of one plan would lie on several servers: give a server of its own"),
    "sentinel": ("a Redis Sentinel", "give the URL of the server that it watches"),
}

type Command = tuple[str | bytes | int, ...]


class Connections:
    """Pooled connections to a server, one per thread that is using it. Also a context manager."""

    def __init__(self, address: StoreAddress, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """Connect and greet the server, so that a wrong address or password fails here.

        Args:
            address: where the server is.
            reply_timeout_s: a server that takes longer for a whole reply is taken for dead.

        Raises:
            StoreError: the server cannot be reached, refuses the password, or is one that cannot serve plans.
        """
        self.address = address
        self._reply_timeout_s = reply_timeout_s
        self._client = redis.Redis.from_url(
            address.url,
            protocol=2,
            driver_info=None,
            socket_timeout=reply_timeout_s,
            socket_connect_timeout=min(CONNECT_TIMEOUT_S, reply_timeout_s),
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.1), _RETRIES, supported_errors=(redis.ConnectionError,)),
            redis_connect_func=self._greet,
        )
        self._client.response_callbacks.clear()  # replies as they came: their form is checked where they are read
        self.request("greeting the server", "PING")

    def request(self, doing: str, *command: str | bytes | int) -> Any:
        """The reply to one command; raises `StoreError` for a refusal, too."""
        (reply,) = self.exchange(doing, [command])
        self.refuse(doing, reply)
        return reply

    def exchange(self, doing: str, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one go and read a reply each; a refusal is a reply, of type `ResponseError`."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute(raise_on_error=False)
        except (RedisError, OSError, RecursionError, ValueError) as error:
            raise self._error(doing, error) from error

    def info(self, *section: str) -> dict[str, str]:
        """The server's description of itself, by name."""
        text: bytes = self.request("asking the server about itself", "INFO", *section)
        return fields_of(text.decode(errors="replace"))

    def refuse(self, doing: str, *replies: object) -> None:
        """Raise the first refusal among some replies."""
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._error(doing, reply) from reply

    def close(self) -> None:
        """Let go of all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self, connection: Any) -> None:
        """On every new connection: bound its replies, and ask what kind of server it is."""
        connection._sock = _Bounded(connection._sock, self._reply_timeout_s)
        try:
            connection.on_connect()
            connection.send_command("INFO", "server")
            try:
                info = connection.read_response()
            except ResponseError:
                return  # this user is refused the question
            check_kind(self.address, fields_of(info.decode(errors="replace")) if isinstance(info, bytes) else {})
        except BaseException:
            connection.disconnect()
            raise

    def _error(self, doing: str, cause: Exception) -> StoreError:
        kind = StoreFullError if isinstance(cause, OutOfMemoryError) else StoreError
        said = "a reply that is nested too deeply" if isinstance(cause, RecursionError) else cause
        return kind(f"plan store {self.address} failed while {doing}: {said}", hint=_hint(cause))


class _Bounded:
    """A socket on which the replies to what was sent last have so much time and so many bytes together.

    redis-py counts time for each receive, and no bytes.
    """

    def __init__(self, link: Any, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._asked_s: float | None = timeout_s
        self._begin()

    def _begin(self) -> None:
        self._end = time.monotonic() + self._timeout_s
        self._bytes_left = _REPLY_BYTES

    def settimeout(self, seconds: float | None) -> None:
        self._asked_s = seconds  # 0: is there anything to receive?
        self._link.settimeout(seconds)

    def sendall(self, data: bytes) -> None:
        self._begin()
        self._link.sendall(data)

    def recv(self, size: int) -> bytes:
        left_s = self._end - time.monotonic()
        if self._asked_s != 0:
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._link.settimeout(left_s if self._asked_s is None else min(self._asked_s, left_s))
        data: bytes = self._link.recv(size)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise InvalidResponse("the reply is larger than anything that was stored")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def fields_of(info: str) -> dict[str, str]:
    """The entries of a server's answer to `INFO`, by name."""
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
