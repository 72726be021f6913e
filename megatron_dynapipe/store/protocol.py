"""What the rest of the package asks of a plan store: bytes under keys, progress under topics, waits with deadlines.

Plans are small (up to some hundred kB), written once and read by several ranks, so a store holds *immutable* values:
a key is published once and then only read or deleted. How far training has come is a *progress* topic: a number that
only grows. Both can be waited for; nobody polls.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_dynapipe.errors import StoreError, StoreTimeoutError

MAX_VALUE_BYTES = 256_000_000
"""Largest value a store takes; Redis refuses strings above 512 MiB, and a plan is a thousandth of this."""


class PlanStore(Protocol):
    """Bytes under keys and progress under topics. Safe to use from several threads.

    Every method raises `StoreError` when the store cannot be reached or refuses the request, `StoreFullError` when it
    has no memory left.
    """

    @property
    def interruptions(self) -> int:
        """How often the store was out of reach; it may have come back empty."""

    def put(self, key: str, value: bytes) -> None:
        """Publish `value` under `key`, all at once; publishing equal bytes again does nothing.

        Raises `StoreError` when the key holds other bytes: two writers disagree about a plan.
        """

    def put_first(self, key: str, value: bytes) -> bool:
        """Publish `value` unless the key is taken; whether it was published. The first writer wins."""

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Publish several keys as `put` does, in few requests; one after another, so that the last is last."""

    def wait_any(self, keys: Sequence[str], *, timeout_s: float, what: str) -> tuple[str, bytes]:
        """Block until one of `keys` exists; that key (the first in order, if several do) and its value.

        The value stays for other readers. `what` names what is awaited, for the error of a wait in vain.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Forget these keys; those that do not exist are no error."""

    def announce(self, topic: str, value: int) -> None:
        """Raise the progress of `topic` to `value` (≥ 0) and wake its waiters; a smaller value changes nothing."""

    def read_progress(self, topics: Sequence[str]) -> dict[str, int]:
        """Progress of those topics that have any, at this moment."""

    def wait_progress(self, goals: Mapping[str, int], *, timeout_s: float, what: str) -> dict[str, int]:
        """Block until the progress of at least one topic has reached its goal; progress of all that have."""

    def close(self) -> None:
        """Let go of connections; waits in other threads end with `StoreError`."""


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
