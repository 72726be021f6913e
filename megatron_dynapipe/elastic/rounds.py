"""One round of a job, between two changes of its nodes, as its ranks see it: a store for all, ranks that do not train.

Ranks that the layout has no use for stand by until the agent ends them or the run has ended; where there are too few
for any layout, all of them wait for more.
"""

import datetime
import hashlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import msgspec

from megatron_dynapipe.elastic.job import LEFT, Job, note
from megatron_dynapipe.errors import ConfigError, DynaPipeError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megatron_dynapipe.elastic.layout import Choice

_ENDED = "run/ended"
_POLL_S = 1.0


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others: a text, or why there is none."""

    text: str = ""
    error: str = ""
    hint: str | None = None


def store_of_round(timeout_s: float) -> "Store | None":
    """torchrun's own store of this round; None where another launcher started the ranks."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # late: importing torch takes a second

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with suppress(RuntimeError):
        return TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=max(timeout_s, _POLL_S)))
    return None


def start_of_ranks() -> str:
    """The same on all ranks: tells a start of theirs from the others that use the same store.

    torchrun keeps its store and counts its restarts. Under `launch` every start has a store of its own, and a node that
    joined late has counted fewer failures than the others.
    """
    return "0" if Job.current() is not None else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def awaited(store: "Store", key: str, what: str, *, timeout_s: float, hint: str) -> str:
    """The text under a key, once a rank has set it; raises ConfigError where none does within `timeout_s`."""
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ConfigError(f"waited {timeout_s:.0f} s for {what}", hint=hint) from error
    return store.get(key).decode()


def from_rank_0(name: str, make: Callable[[], str], *, timeout_s: float) -> str:
    """A text that rank 0 makes for all; without torchrun's store every rank makes it.

    Raises:
        ConfigError: on every rank: rank 0 could not make it, or not within `timeout_s`.
    """
    store = store_of_round(timeout_s)
    if store is None:
        return make()
    key = f"{name}/{start_of_ranks()}"
    if os.environ["RANK"] == "0":
        store.set(key, msgspec.json.encode(_made(make)).decode())
    text = awaited(store, key, f"rank 0's {name}", timeout_s=timeout_s, hint="a larger timeout_s allows more time")
    told = msgspec.json.decode(text, type=_Told)
    if told.error:
        raise ConfigError(told.error, hint=told.hint)
    return told.text


def _made(make: Callable[[], str]) -> _Told:
    try:
        return _Told(text=make())
    except DynaPipeError as error:
        return _Told(error=error.message, hint=error.hint)


def says_first(text: str) -> bool:
    """Whether this rank is the first of the round to print a text that others may print too; without a store it is."""
    with suppress(RuntimeError):  # the store may be gone with the process that hosts it
        if (store := store_of_round(_POLL_S)) is not None:
            key = f"said/{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
            return store.compare_set(key, "", os.environ["RANK"]) == os.environ["RANK"].encode()
    return True


def await_more_ranks(choice: "Choice", job: Job) -> NoReturn:
    """Wait until the agents start the ranks anew, with more of them.

    Raises:
        ConfigError: they did not within the job's limit.
    """
    world = os.environ["WORLD_SIZE"]
    needs = f"the smallest layout that fits needs {choice.needed} ranks, {world} are here ({choice.reason})"
    if os.environ["RANK"] == "0":
        note("too few", needed=choice.needed)
        print(f"waiting for more ranks: {needs}", flush=True)
    time.sleep(job.wait_s)
    raise ConfigError(f"waited {job.wait_s:.0f} s for more ranks: {needs}", hint="start `launch` on more nodes")


def stand_by(choice: "Choice", *, timeout_s: float) -> NoReturn:
    """Do nothing until the agent ends this rank, or the run has ended."""
    print(f"rank {os.environ['RANK']} stands by: {choice.ranks} ranks train", flush=True)
    store = store_of_round(timeout_s)
    try:
        while store is not None and not store.check([_ENDED]):
            time.sleep(_POLL_S)
    except RuntimeError:  # the node that hosts the store has gone
        sys.exit(LEFT)
    sys.exit(0)


def tell_end() -> None:
    """Tell ranks that stand by that the run has ended."""
    if (store := store_of_round(_POLL_S)) is not None:
        store.set(_ENDED, "1")
