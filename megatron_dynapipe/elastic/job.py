"""What an agent and its ranks share: a record in the environment, exit statuses, a key-value store.

The store is torchrun's: its agent hosts it at MASTER_ADDR:MASTER_PORT and says so in the environment; other launchers
have none. Over it ranks agree before any process group exists.
"""

import contextlib
import datetime
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from megatron_dynapipe.errors import ConfigError, DynaPipeError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

VARIABLE = "MEGATRON_DYNAPIPE_LAUNCH"
"""Environment variable by which ranks know that `launch` started them, and how."""
LEFT = 75
"""Exit status of a rank that has saved a checkpoint and left because the set of nodes changes."""
CANNOT_START = 2
"""Exit status of a rank that cannot run as it was asked to: starting it again does not help."""
SAVE_EVERY = 50
"""Iterations between two emergency checkpoints by default."""
_SAY_S = 5.0


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `launch` passes to its ranks.

    Attributes:
        most_ranks: of the job, with all nodes there.
        wait_s: how long ranks wait for more of them where too few are there for any layout.
        emergency_every: iterations between two checkpoints against a loss without notice; 0 saves none.
        trains_file: a rank makes this file after its first iteration, for its agent.
    """

    most_ranks: int
    wait_s: float
    emergency_every: int = SAVE_EVERY
    trains_file: str | None = None

    @classmethod
    def current(cls) -> Self | None:
        """Of the process that asks; None where `launch` did not start it."""
        text = os.environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def to_environment(self) -> None:
        """Let processes that this one starts find it."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def note_training() -> None:
    """Let the agent know that this start has completed an iteration."""
    job = Job.current()
    if job is not None and job.trains_file is not None:
        Path(job.trains_file).touch()


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

    def answer(**found: str | None) -> None:
        store.set(name, msgspec.json.encode(found).decode())

    if os.environ["RANK"] == "0":
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
    found = msgspec.json.decode(store.get(name), type=dict[str, str | None])
    if "error" in found:
        raise ConfigError(found["error"] or "", hint=found.get("hint"))
    return found["text"] or ""


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
