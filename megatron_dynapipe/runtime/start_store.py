"""The key-value store over which ranks agree before any process group exists.

torchrun's agent hosts it at MASTER_ADDR:MASTER_PORT and says so in the environment; other launchers have none, and
there every rank stands for itself. Runs that may start again ask for a store of this start alone (`renew`).
"""

import contextlib
import datetime
import hashlib
import os
import time
import uuid
from collections.abc import Callable

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_dynapipe.core.errors import ConfigError, DynaPipeError
from megatron_dynapipe.outputs import is_first_rank

_SAY_S = 5.0
_POLL_S = 0.05
_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
_renewed: Store | None = None


def may_start_again() -> bool:
    """Whether torchrun starts the ranks anew when one fails."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def has_store() -> bool:
    """Whether ranks share a store: torchrun's agent hosts one, or they have made one."""
    return _renewed is not None or os.environ.get(_AGENTS) == "True"


def start_store(timeout_s: float) -> Store | None:
    """A client of the store, with keys of this start of the ranks alone; None without one.

    Raises:
        RuntimeError: the store does not answer within `timeout_s`.
    """
    if _renewed is not None:
        return _renewed
    if not has_store():
        return None
    return PrefixStore(f"dynapipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _agents(timeout_s))


def renew(timeout_s: float) -> None:
    """Make a store that this start of torchrun's ranks shares, hosted by rank 0, for `start_store` and process groups.

    torchrun's agents keep their store over starts, with all keys of the start before, and count their restarts each by
    itself: nothing in it or in the environment tells two starts apart (torch 2.11). So every rank asks there under a
    key of its own, and rank 0 answers with the port of a fresh store until all ranks have met in it. With
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 the address is a fresh one for every start. Nothing happens without torchrun.

    Raises:
        ConfigError: some rank did not come within `timeout_s`.
    """
    global _renewed
    if "TORCHELASTIC_RUN_ID" not in os.environ or _renewed is not None:
        return
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    try:
        if os.environ.get(_AGENTS) != "True":
            store = _hosted(int(os.environ["MASTER_PORT"]), timeout_s, rank)
        elif rank == 0:
            store = _hosted(0, timeout_s, rank)
            _answer(_agents(timeout_s), store, world, timeout_s)
        else:
            store = _hosted(_asked(_agents(timeout_s), rank), timeout_s, rank)
            store.add("dynapipe/met", 1)
    except RuntimeError as error:
        raise ConfigError(
            f"rank {rank} waited {timeout_s:.0f} s for the {world} ranks to meet: {error}",
            hint="look for a rank that did not start; --dynapipe-timeout-s allows more time",
        ) from error
    os.environ |= {"MASTER_PORT": str(store.port), _AGENTS: "False"}
    _renewed = PrefixStore("dynapipe", store)


def _agents(timeout_s: float) -> TCPStore:
    return _client(int(os.environ["MASTER_PORT"]), timeout_s)


def _client(port: int, timeout_s: float) -> TCPStore:
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)


def _hosted(port: int, timeout_s: float, rank: int) -> TCPStore:
    """A client of rank 0's store, which it hosts in such a way that torch's process groups use the same."""
    if rank:
        return _client(port, timeout_s)
    return TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _asked(agents: Store, rank: int) -> int:
    question = uuid.uuid4().hex
    agents.set(f"dynapipe/asks/{rank}", question)
    return int(agents.get(f"dynapipe/port/{question}"))


def _answer(agents: Store, store: TCPStore, world: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (met := store.add("dynapipe/met", 0)) < world - 1:
        for rank in range(1, world):
            if agents.check([f"dynapipe/asks/{rank}"]):
                question = agents.get(f"dynapipe/asks/{rank}").decode()
                agents.set(f"dynapipe/port/{question}", str(store.port))
        if time.monotonic() > deadline:
            raise RuntimeError(f"{met + 1} of them came")
        time.sleep(_POLL_S)


def from_rank_0(name: str, make: Callable[[], str], *, timeout_s: float) -> str:
    """A text that rank 0 makes for all; without a store every rank makes it.

    Args:
        name: the text's, used once in a start of the ranks; it stands in errors.
        make: makes it, on rank 0.
        timeout_s: how long rank 0 may take.

    Raises:
        ConfigError: on the other ranks: rank 0 raised an error, which says the same, or took longer than `timeout_s`.
    """
    store = start_store(timeout_s)
    if store is None:
        return make()

    def answer(**fields: str | None) -> None:
        store.set(name, msgspec.json.encode(fields).decode())

    if is_first_rank():
        try:
            text = make()
        except DynaPipeError as error:
            answer(error=error.message, hint=error.hint)
            raise
        except BaseException as error:
            answer(error=f"rank 0 failed: {type(error).__name__}: {error}")
            raise
        answer(text=text)
        return text
    try:
        store.wait([name], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ConfigError(
            f"waited {timeout_s:.0f} s for rank 0's {name}",
            hint="--dynapipe-timeout-s, or timeout_s in a script of yours, allows more time",
        ) from error
    fields = msgspec.json.decode(store.get(name), type=dict[str, str | None])
    if "error" in fields:
        raise ConfigError(fields["error"] or "", hint=fields.get("hint"))
    return fields["text"] or ""


class StartGroup:
    """The ranks of a start, which exchange texts over its store; every rank calls the methods, in the same order.

    Args:
        name: the exchange's, used once in a start of the ranks.
        timeout_s: a rank that does not take part for this long fails the others.
    """

    def __init__(self, name: str, store: Store, *, timeout_s: float) -> None:
        self._store = PrefixStore(name, store)
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._calls = 0

    def broadcast_text(self, text: str) -> str:
        """The text of rank 0, on every rank."""
        key = self._key()
        if self._rank == 0:
            self._store.set(key, text)
            return text
        self._wait([key], "rank 0")
        return self._store.get(key).decode()

    def collect(self, data: bytes) -> list[bytes]:
        """On rank 0 what every rank hands in, by rank; nothing on the others."""
        key = self._key()
        if self._rank:
            self._store.set(f"{key}/{self._rank}", data.decode())
            return []
        others = [f"{key}/{rank}" for rank in range(1, self._size)]
        self._wait(others, "all ranks")
        return [data, *self._store.multi_get(others)]

    def _key(self) -> str:
        self._calls += 1
        return str(self._calls)

    def _wait(self, keys: list[str], who: str) -> None:
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            raise ConfigError(
                f"rank {self._rank} waited {self._timeout.total_seconds():.0f} s for {who} to compare flags",
                hint="look for a rank that did not start; --dynapipe-timeout-s allows more time",
            ) from error


def says_first(text: str) -> bool:
    """Whether this rank is the first of the job to print a text that others may print too; without a store it is."""
    rank = os.environ.get("RANK", "0")
    with contextlib.suppress(Exception):  # the store may be gone with the process that hosts it
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else start_store(_SAY_S)
        if store is not None:
            key = f"said/{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
            return store.compare_set(key, "", rank) == rank.encode()
    return True
