"""The port that plans pass through: bytes under keys, progress under topics, waits with deadlines.

Plans are small (up to some hundred kB), written once and read by several nodes: a key is published once and then only
read or deleted. How far training has come is a *progress* topic: a number that only grows. Both can be waited for.

`RedisStore` is the one implementation; `tests/store/test_contract.py` holds what every one has to promise.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

RETENTION_S = 2 * 3600
"""Entries that nobody deletes (their job was killed) leave a shared server after this time."""
REPLY_TIMEOUT_S = 30.0
"""How long a whole reply may take where the caller does not say."""


class Store(Protocol):
    """The place at which planners publish plans and ranks find them. It is safe to use from several threads.

    Every method raises `StoreError` when the store cannot be reached or refuses the request, `StoreFullError` when it
    has no memory left. The waits raise `StoreTimeoutError`; `what` names in it what was awaited.
    """

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Publish keys, each all at once; one that is taken keeps what it holds."""
        ...

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:
        """Block until one of `keys` exists; that key (the first in order, if several do) and its value.

        The value stays for other readers.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Forget these keys; those that do not exist are no error."""
        ...

    def announce(self, topic: str, value: int) -> None:
        """Raise the progress of `topic` to `value` (≥ 0) and wake its waiters; a smaller value changes nothing."""
        ...

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        """Progress of those topics that have any, at this moment."""
        ...

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        """Block until the progress of at least one topic has reached its goal; progress of all that have."""
        ...
