"""Ranks start together or not at all, before any process group exists.

Over a store that ranks share (`runtime.start_store`) one rank with an error reports it for all, and no rank goes on
into Megatron's initialisation, where it would wait for that rank.
"""

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.entry.leaving import GRACE_S, leave_report_to_another_rank
from megatron_dynapipe.megatron.supply.same_flags import check_same_flags
from megatron_dynapipe.outputs import is_first_rank
from megatron_dynapipe.runtime.start_store import StartGroup, has_store, start_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_READY, _VERDICT, _GO, _LEAVING = "ready", "verdict", "go", "leaving"
REPORTED_HERE = "reported_here"
"""Attribute of an error that this rank reports, whichever it is."""
_RANK_0_FIRST_S = 2.0


def start_together[T](check: Callable[[], T], *, timeout_s: float, name: str = "run") -> T:
    """Run `check` on every rank; return its value once it has succeeded on all.

    `name` is the check's, once in a start of the ranks.

    Of the ranks whose check fails one raises its error, rank 0 if it is among them; the others exit with status 2 and
    leave the report to it. Without a store every rank stands for itself.

    Raises:
        ConfigError: some rank did not finish its check within `timeout_s`.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    store = start_store(timeout_s) if world > 1 else None
    if store is None:
        return check()
    rank = os.environ["RANK"]
    verdict = f"{name}/{_VERDICT}"
    try:
        value = check()
    except Exception as error:
        if rank != "0":
            _wait_for_rank_0(store, verdict)
        if store.compare_set(verdict, "", rank) != rank.encode():
            _leave(store)
        setattr(error, REPORTED_HERE, True)
        _wait_for_leaving(store, world - 1)
        raise
    if store.add(f"{name}/{_READY}", 1) == world:
        store.compare_set(verdict, "", _GO)
    try:
        store.wait([verdict], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ConfigError(
            f"rank {rank} waited {timeout_s:.0f} s for all {world} ranks to check their arguments",
            hint="look for a rank that did not start; --dynapipe-timeout-s allows more time",
        ) from error
    if store.get(verdict) != _GO.encode():
        _leave(store)
    return value


def _leave(store: "Store") -> NoReturn:
    with contextlib.suppress(RuntimeError):
        store.add(_LEAVING, 1)
    leave_report_to_another_rank(2)


def _wait_for_leaving(store: "Store", ranks: int) -> None:
    """Give ranks that are still starting a moment to leave by themselves: torchrun lists those that it ends."""
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(RuntimeError):
        while store.add(_LEAVING, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)


def _wait_for_rank_0(store: "Store", verdict: str) -> None:
    """Give rank 0 a moment to report the error if it has it too."""
    with contextlib.suppress(RuntimeError):
        store.wait([verdict], datetime.timedelta(seconds=_RANK_0_FIRST_S))


def compare_flags(flags: Mapping[str, str], *, timeout_s: float) -> None:
    """Compare flags over the start store; nothing happens without one. Raises ConfigError on every rank.

    `flags` are what `same_flags.comparable` gives. All ranks come here, as after `start_together`.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    store = start_store(timeout_s) if world > 1 else None
    if store is not None:
        check_same_flags(flags, StartGroup("compare flags", store, timeout_s=timeout_s))


def ranks_stand_alone() -> bool:
    """Whether there are several ranks without a start store: they agree on nothing before Megatron connects them."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not has_store()


def checks_for_all() -> bool:
    """Whether this rank runs the checks that one rank can run for all: rank 0, or every rank without a start store."""
    return is_first_rank() or not has_store()


def reports_for_all() -> bool:
    """Whether this rank prints an error that all ranks have: the first of each node, in case nodes differ."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0
