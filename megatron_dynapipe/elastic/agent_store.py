"""The key-value store of torchrun's agent, over which ranks agree before any process group exists.

The agent hosts it at MASTER_ADDR:MASTER_PORT and says so in the environment; other launchers have none.
"""

import contextlib
import datetime
import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from megatron_dynapipe.elastic.job import Job
from megatron_dynapipe.errors import ConfigError, DynaPipeError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_SAY_S = 5.0


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 made for all: a text, or the error that kept it from it."""

    text: str = ""
    error: str = ""
    hint: str | None = None


def has_agent_store() -> bool:
    """Whether torchrun's agent started this rank and shares its store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store(timeout_s: float) -> "Store | None":
    """A client of the store, with keys of this start of the ranks alone; None without an agent.

    Raises:
        RuntimeError: the store does not answer within `timeout_s`.
    """
    if not has_agent_store():
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # late: importing torch takes a second

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    return PrefixStore(f"dynapipe/{start_of_ranks()}", store)


def start_of_ranks() -> str:
    """The same on all ranks: tells a start of theirs from the others that use the same store.

    torchrun keeps its store and counts its restarts. Under `launch` every start has a store of its own, and a node that
    joined late has counted fewer failures than the others.
    """
    return "0" if Job.current() is not None else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def from_rank_0(name: str, make: Callable[[], str], *, timeout_s: float) -> str:
    """A text that rank 0 makes for all; without an agent's store every rank makes it.

    Args:
        name: of the text, once in a start of the ranks; stands in errors.
        make: makes it, on rank 0.
        timeout_s: for rank 0.

    Raises:
        ConfigError: on the other ranks: rank 0 raised an error, which says the same, or took longer than `timeout_s`.
    """
    store = agent_store(timeout_s)
    if store is None:
        return make()
    if os.environ["RANK"] == "0":
        try:
            text = make()
        except BaseException as error:
            store.set(name, msgspec.json.encode(_answer_of(error)).decode())
            raise
        store.set(name, msgspec.json.encode(_Answer(text=text)).decode())
        return text
    try:
        store.wait([name], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ConfigError(
            f"waited {timeout_s:.0f} s for rank 0's {name}",
            hint="--dynapipe-timeout-s, or timeout_s in a script of yours, allows more time",
        ) from error
    answer = msgspec.json.decode(store.get(name), type=_Answer)
    if answer.error:
        raise ConfigError(answer.error, hint=answer.hint)
    return answer.text


def _answer_of(error: BaseException) -> _Answer:
    if isinstance(error, DynaPipeError):
        return _Answer(error=error.message, hint=error.hint)
    return _Answer(error=f"rank 0 failed: {type(error).__name__}: {error}")


def says_first(text: str) -> bool:
    """Whether this rank is the first of the job to print a text that others may print too; without a store it is."""
    import torch.distributed as dist

    rank = os.environ.get("RANK", "0")
    with contextlib.suppress(Exception):  # the store may be gone with the process that hosts it
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else agent_store(_SAY_S)
        if store is not None:
            key = f"said/{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
            return store.compare_set(key, "", rank) == rank.encode()
    return True
