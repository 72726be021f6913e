"""The plan store on a Redis or Valkey server.

A key is a stream of one entry: the server itself refuses a second entry of the same id, so that the first writer wins
and a request may be sent twice, and `XREAD BLOCK` waits for the first of several streams without taking anything away.
A progress topic is a stream of one entry as well, whose *id* is the progress: the server keeps ids growing and wakes
exactly those readers whose goal is reached.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis.exceptions import ResponseError

from megatron_dynapipe.core.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.connection import MAX_VALUE_BYTES, Command, Connections
from megatron_dynapipe.store.protocol import REPLY_TIMEOUT_S, RETENTION_S

COMMANDS = "-@all +ping +select +xadd +xread +unlink +expire +info"
"""Rights that a user of the server needs, as its ACL says it; with the keys `address.PATTERN`."""
_BATCH = 256
"""Values in one request: a large iteration is published in a few."""
_BLOCK_S = 1.0
"""The server answers a blocking read after this time at the latest; it is then sent again."""
_ENTRY_ID = "1-1"
_FIELD = b"v"
_TAKEN = "equal or smaller than the target stream top item"  # the same words in every Redis and Valkey


class RedisStore(Connections):
    """A `Store` on one server. Also a context manager.

    Attributes:
        retention_s: seconds after which an entry disappears; None keeps all.
    """

    def __init__(
        self,
        address: StoreAddress | str,
        *,
        retention_s: int | None = RETENTION_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        """Connect as `Connections` does; `address` may be a URL, `retention_s` is None on a job's own server."""
        self.retention_s = retention_s
        address = address if isinstance(address, StoreAddress) else StoreAddress(address)
        super().__init__(address, reply_timeout_s=reply_timeout_s)

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        """See `Store`; in few requests."""
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            commands: list[Command] = []
            for key, value in batch:
                if len(value) > MAX_VALUE_BYTES:
                    raise StoreError(f"value of key {key} is {len(value)} B, above the limit of {MAX_VALUE_BYTES} B")
                commands += self._appending(key, _ENTRY_ID, value)
            self._append(f"publishing {batch[0][0]} and {len(batch) - 1} more", commands)

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:
        """See `Store`."""
        entries = self._wait(dict.fromkeys(keys, "0-0"), timeout_s, what)
        key = next(key for key in keys if key in entries)
        return key, entries[key][1]

    def delete(self, keys: Sequence[str]) -> None:
        """See `Store`."""
        if keys:
            self.request(f"deleting {len(keys)} keys", "UNLINK", *keys)

    def announce(self, topic: str, value: int) -> None:
        """See `Store`."""
        assert value >= 0, f"progress is never negative, got {value}"
        self._append(f"announcing {topic} = {value}", self._appending(topic, f"{value}-1", b""))

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        """See `Store`."""
        if not topics:
            return {}
        reply = self.request("reading progress", "XREAD", "COUNT", 1, "STREAMS", *topics, *["0-0"] * len(topics))
        return {topic: progress for topic, (progress, _) in _entries(reply, "reading progress").items()}

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        """See `Store`."""
        entries = self._wait({topic: f"{goal}-0" for topic, goal in goals.items()}, timeout_s, what)
        return {topic: progress for topic, (progress, _) in entries.items()}

    def describe(self) -> str:
        """The server's kind and version, where it is, and how it is used."""
        info = self.info()
        version = info.get("valkey_version")
        server = f"Redis {info.get('redis_version')}" if version is None else f"Valkey {version}"
        memory, limit = (int(info.get(name, "0")) // BYTES_PER_MB for name in ("used_memory", "maxmemory"))
        usage = f"{memory:,} MB used of {f'{limit:,} MB' if limit else 'no limit'}"
        others = int(info.get("connected_clients", "1")) - 1
        return f"{server} at {self.address}: {usage}, {others} other clients"

    def _append(self, doing: str, commands: Sequence[Command]) -> None:
        """Send what `_appending` has made; an entry that is there already stays."""
        replies = self.exchange(doing, commands)
        self.refuse(
            doing, *(reply for reply in replies if not (isinstance(reply, ResponseError) and _TAKEN in str(reply)))
        )

    def _appending(self, key: str, entry_id: str, value: bytes) -> list[Command]:
        commands: list[Command] = [("XADD", key, "MAXLEN", 1, entry_id, _FIELD, value)]
        if self.retention_s is not None:
            commands.append(("EXPIRE", key, self.retention_s))
        return commands

    def _wait(self, after: Mapping[str, str], timeout_s: float, what: str) -> dict[str, tuple[int, bytes]]:
        """(first half of its id, value) of the newest entry of each stream that has one beyond the id in `after`."""
        assert after and 0 < timeout_s < math.inf, f"a wait needs a key or topic and a deadline, got {timeout_s}"
        doing = f"waiting for {what}"
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            milliseconds = math.ceil(min(left_s, _BLOCK_S) * 1000)
            reading: Command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *after, *after.values())
            if (reply := self.request(doing, *reading)) is not None:
                return _entries(reply, doing)
            if time.monotonic() >= deadline:
                raise StoreTimeoutError(
                    f"waited {timeout_s:g} s for {what}, and none of these came: {', '.join(after)}"
                )


open_store = RedisStore
"""Connects to a store; a context manager."""


def _entries(reply: Any, doing: str) -> dict[str, tuple[int, bytes]]:
    """Entries of the answer to `XREAD`, [[stream, [[id, [field, value]]]], …], by stream."""
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
