"""Looking at a plan store's server from outside a run, and stopping it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.address import StoreAddress

TIMEOUT_S = 10.0
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What a store holds of one job.

    Attributes:
        job: the name of the launch.
        plans: stages' plans that wait or have not been cleared away.
        iterations: per split, the first and the last iteration that a plan is held for.
        failed: whether a planner of this job has published its failure.
    """

    job: str
    plans: int
    iterations: dict[str, tuple[int, int]]
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """A store's server and what it holds. A memory limit of 0 bytes is none."""

    server: str
    uptime_s: int
    clients: int
    memory_bytes: int
    memory_limit_bytes: int
    jobs: tuple[JobReport, ...]


def inspect_server(address: StoreAddress) -> ServerReport:
    """Describe the server at `address`; raises `StoreError` when it cannot be reached or refuses."""
    with _client(address, "inspecting it") as client:
        info: dict[str, Any] = client.info()
        keys = sorted(key.decode(errors="replace") for key in client.scan_iter("dynapipe:*", count=_SCAN_COUNT))
    version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    return ServerReport(
        server=version,
        uptime_s=info["uptime_in_seconds"],
        clients=info["connected_clients"] - 1,  # less the one that asks
        memory_bytes=info["used_memory"],
        memory_limit_bytes=info["maxmemory"],
        jobs=jobs_of(keys),
    )


def stop_server(address: StoreAddress) -> None:
    """Stop the server at `address`; what it holds is lost. Raises `StoreError` as `inspect_server` does."""
    with _client(address, "stopping it") as client:
        client.ping()
        client.shutdown(nosave=True, now=True)  # answered by the end of the connection


def jobs_of(keys: list[str]) -> tuple[JobReport, ...]:
    """Sum up a store's keys (their layout: `keys.py`) by job."""
    parts = [key.split(":") for key in keys]
    names = sorted({part[1] for part in parts if len(part) > 2})
    return tuple(_job(name, [part[2:] for part in parts if part[1] == name]) for name in names)


def _job(name: str, keys: list[list[str]]) -> JobReport:
    plans = [(split, int(iteration)) for _, split, iteration, _, _ in (key for key in keys if len(key) == 5)]
    splits: dict[str, list[int]] = {}
    for split, iteration in plans:
        splits.setdefault(split, []).append(iteration)
    return JobReport(
        job=name,
        plans=len(plans),
        iterations={split: (min(held), max(held)) for split, held in splits.items()},
        failed=["error"] in keys,
    )


@contextlib.contextmanager
def _client(address: StoreAddress, doing: str) -> Iterator[Any]:
    client = redis.Redis.from_url(
        address.url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
    )
    try:
        yield client
    except (RedisError, OSError) as error:
        raise StoreError(
            f"plan store {address.redacted} failed while {doing}: {error}",
            hint="is the URL, password included, the one that `store start` printed, and the server still up?",
        ) from error
    finally:
        client.close()
