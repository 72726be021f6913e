"""A rank that fails says so: its peers stop waiting for it within seconds, and their errors name it.

    rank 1   fails ──► writes its name into the store, breaks its groups
    rank 0   waits for rank 1 ──► connection closed ──► reads the name, breaks its groups
    rank 2   waits for rank 0 ──► connection closed ──► …

A gloo group in which a receive has expired closes its connections; so does the end of a process. Ranks that lost a
connection and find no name wait a moment for each other: those that do not come have ended. What waits on a GPU ends
with its process, or by NCCL's time-out.
"""

import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

from megatron_dynapipe.errors import ExecutionError
from megatron_dynapipe.runtime.control_group import AGREED, ControlGroup

_TAG = 1 << 20
"""Of a receive that nobody sends."""
_PATIENCE_S, _PAUSE_S = 5.0, 0.05


class Failures:
    """What ranks tell each other of failures.

    Args:
        control: of all ranks.
        groups: of this rank; those of gloo are broken when it fails.
    """

    def __init__(self, control: ControlGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        self._rank, self._size = control.rank, control.size
        self._groups = [group for group in groups if dist.get_backend(group) == "gloo"]
        self._is_broken = False
        self._key = f"dynapipe/failure/{control.group.group_name}"

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """An error that is not all ranks' ends their waits; one that comes of a lost peer names it.

        Raises:
            ExecutionError: in place of a lost connection: which rank failed, and how.
        """
        try:
            yield
        except Exception as error:
            if getattr(error, AGREED, False):
                raise
            if not (self._is_broken or _is_lost_connection(error)):
                self._leave(f"rank {self._rank} failed: {_line(error)}")
                raise
            raise ExecutionError(self._reason()) from error

    def _leave(self, reason: str) -> None:
        """Write down this rank's failure, if it is the first, and break the groups."""
        with contextlib.suppress(Exception):  # the store may be gone with the rank that hosts it
            get_default_store().compare_set(self._key, "", reason)
        self._break_groups()

    def _break_groups(self) -> None:
        self._is_broken = True
        for group in self._groups:
            peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
            with contextlib.suppress(Exception):
                work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_TAG)
                assert work is not None, "this rank is in it"
                work.wait(datetime.timedelta(milliseconds=1))

    def _reason(self) -> str:
        """Why a connection was lost."""
        store, keys = get_default_store(), [f"{self._key}/{rank}" for rank in range(self._size)]
        end = time.monotonic() + _PATIENCE_S
        try:
            store.set(keys[self._rank], "")
            self._break_groups()
            while True:
                if store.check([self._key]):
                    return str(store.get(self._key).decode())
                silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                if not silent or time.monotonic() > end:
                    return f"the connection to a peer is lost: rank {', '.join(silent) or '?'} has ended or is cut off"
                time.sleep(_PAUSE_S)
        except dist.DistError:
            return "the connection to a peer is lost, and the rank that hosts the process group's store is gone"


def _is_lost_connection(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
