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
from megatron_dynapipe.store.keys import parse_key

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
    version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    return ServerReport(
        server=version,
        uptime_s=_number(info, "uptime_in_seconds"),
        clients=_number(info, "connected_clients") - 1,  # less the one that asks
        memory_bytes=_number(info, "used_memory"),
        memory_limit_bytes=_number(info, "maxmemory"),
        jobs=jobs_of(keys),
    )


def read_figures(address: StoreAddress) -> list[tuple[str, bytes]]:
    """(job, what a planner of it last reported of itself); raises `StoreError` as `inspect_server` does."""
    with _client(address, "reading planners' figures") as client:
        keys = sorted(client.scan_iter("dynapipe:*:planner:*", count=_SCAN_COUNT, _type="string"))
        names = [parse_key(key.decode(errors="replace")) for key in keys]
        found = zip(names, client.mget(keys) if keys else [], strict=True)
        return [(name.job, data) for name, data in found if name is not None and name.is_figures and data is not None]


def stop_server(address: StoreAddress) -> None:
    """Stop the server at `address`; what it holds is lost. Raises `StoreError` as `inspect_server` does."""
    with _client(address, "stopping it") as client:
        client.ping()
        client.shutdown(nosave=True)  # answered by the end of the connection; NOW is not known to Redis 6.2


def jobs_of(keys: list[str]) -> tuple[JobReport, ...]:
    """Sum up a store's keys (their layout: `keys.py`) by job; keys of other programs are passed over."""
    plans: dict[str, list[tuple[str, int]]] = {}
    failed = set()
    for name in map(parse_key, keys):
        if name is None:
            continue
        held = plans.setdefault(name.job, [])
        if name.plan is not None:
            held.append(name.plan)
        if name.is_error:
            failed.add(name.job)
    return tuple(_job(job, plans[job], failed=job in failed) for job in sorted(plans))


def _job(name: str, plans: list[tuple[str, int]], *, failed: bool) -> JobReport:
    splits: dict[str, list[int]] = {}
    for split, iteration in plans:
        splits.setdefault(split, []).append(iteration)
    return JobReport(
        job=name,
        plans=len(plans),
        iterations={split: (min(held), max(held)) for split, held in splits.items()},
        failed=failed,
    )


def _number(info: dict[str, Any], name: str) -> int:
    """A number that a server reports of itself; 0 where it does not."""
    number = info.get(name)
    return number if isinstance(number, int) else 0


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
