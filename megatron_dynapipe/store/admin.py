"""Looking at a plan store's server from outside a run, and stopping it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import redis

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.address import PATTERN, StoreAddress, parse_key
from megatron_dynapipe.store.redis_store import PlanStore, open_store

TIMEOUT_S = 10.0
_FAILURE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What a store holds of one job.

    Attributes:
        job: the name of the launch.
        plans: stages' plans that wait or have not been cleared away.
        iterations: per split, the first and the last iteration that a plan is held for.
        training: per split, the iteration that training is at; none before the first.
        failure: what a planner of this job has published of its failure; None where none has failed.
    """

    job: str
    plans: int = 0
    iterations: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    training: Mapping[str, int] = field(default_factory=dict)
    failure: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """A store's server and what it holds. A memory limit of 0 bytes is none.

    Attributes:
        server: program and version.
        uptime_s: since it started.
        clients: connections beside the one that asks.
        memory_bytes, memory_limit_bytes: used, and at most.
        jobs: what it holds of each.
        other_keys: keys of other programs, and of other databases of the server.
    """

    server: str
    uptime_s: int
    clients: int
    memory_bytes: int
    memory_limit_bytes: int
    jobs: tuple[JobReport, ...]
    other_keys: int


def inspect_server(address: StoreAddress) -> ServerReport:
    """Describe the server at `address`; raises `StoreError` when it cannot be reached or refuses."""
    with open_store(address, reply_timeout_s=TIMEOUT_S) as store:
        found = [key for keys in store.scan("inspecting it", PATTERN) for key in keys]
        keys = {key.decode(errors="replace") for key in found}
        info = store.info()
        jobs = tuple(_with_state(job, store, keys) for job in jobs_of(keys))
    version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    return ServerReport(
        server=version,
        uptime_s=_number(info, "uptime_in_seconds"),
        clients=_number(info, "connected_clients") - 1,
        memory_bytes=_number(info, "used_memory"),
        memory_limit_bytes=_number(info, "maxmemory"),
        jobs=jobs,
        other_keys=_all_keys(info) - sum(parse_key(key) is not None for key in keys),
    )


def stop_server(address: StoreAddress, *, force: bool = False) -> None:
    """Stop the server at `address`; what it holds is lost.

    Raises:
        StoreError: it cannot be reached or refuses, holds keys of other programs, or serves a job.
    """
    if not force:
        _check_unused(address, inspect_server(address))
    with open_store(address, reply_timeout_s=TIMEOUT_S) as store:
        try:
            store.request("stopping it", "SHUTDOWN", "NOSAVE")  # NOW is not known to Redis 6.2
        except StoreError as error:
            if not isinstance(error.__cause__, redis.ConnectionError):  # the connection's end is the answer
                raise


def _check_unused(address: StoreAddress, report: ServerReport) -> None:
    hint = "what it holds is lost when it stops; --force stops it all the same"
    if report.other_keys > 0:
        raise StoreError(
            f"expected a server of plans alone at {address}, it holds {report.other_keys} keys of other programs",
            hint=hint,
        )
    if report.jobs and report.clients > 0:
        names = ", ".join(job.job for job in report.jobs)
        raise StoreError(
            f"expected no job that uses the server at {address}, it has {report.clients} clients and holds plans of"
            f" {names}",
            hint=hint,
        )


def jobs_of(keys: Iterable[str]) -> tuple[JobReport, ...]:
    """Sum up a store's keys (their layout: `address`) by job; keys of other programs are left out."""
    plans: dict[str, dict[str, list[int]]] = {}
    for found in map(parse_key, keys):
        if found is not None:
            splits = plans.setdefault(str(found["job"]), {})
            if (iteration := found["iteration"]) is not None:
                splits.setdefault(str(found["split"]), []).append(int(iteration))
    return tuple(_job(job, plans[job]) for job in sorted(plans))


def _job(name: str, splits: Mapping[str, Sequence[int]]) -> JobReport:
    iterations = {split: (min(splits[split]), max(splits[split])) for split in sorted(splits)}
    return JobReport(job=name, plans=sum(map(len, splits.values())), iterations=iterations)


def _with_state(job: JobReport, store: PlanStore, keys: Iterable[str]) -> JobReport:
    """A job's report with its progress and its failure, as the store has them now."""
    own = {key: found for key in keys if (found := parse_key(key)) is not None and found["job"] == job.job}
    topics = {key: str(found["split"]) for key, found in own.items() if found["progress"]}
    failure = None
    for key in (key for key, found in own.items() if found["error"]):
        failure = store.wait_any([key], timeout_s=_FAILURE_TIMEOUT_S, what="a planner's failure")[1]
    training = {topics[topic]: value for topic, value in sorted(store.read_progress(list(topics)).items())}
    return dataclasses.replace(job, training=training, failure=failure)


def _all_keys(info: Mapping[str, str]) -> int:
    """Keys of all databases, as in `db0:keys=3,expires=0`."""
    counts = (value.partition("keys=")[2].partition(",")[0] for name, value in info.items() if name.startswith("db"))
    return sum(int(count) for count in counts if count.isdecimal())


def _number(info: Mapping[str, str], name: str) -> int:
    """A number that a server reports of itself; 0 where it does not."""
    text = info.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 20 else 0
