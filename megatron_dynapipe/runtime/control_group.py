"""Agreement of all ranks over a gloo group of its own: one text for all, one error for all."""

import datetime
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_dynapipe.errors import DynaPipeError, PlannerFailedError

_T = TypeVar("_T")


class ControlGroup:
    """A CPU process group over all ranks. Every rank makes it, and calls its methods, in the same order.

    Args:
        timeout_s: a rank that does not take part for this long fails the others.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def broadcast_text(self, text: str, *, source: int = 0) -> str:
        """`text` of rank `source`, on every rank."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, source, group=self._group)
        if self.rank != source:
            data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
        dist.broadcast(data, source, group=self._group)
        return bytes(data.numpy().tobytes()[: int(size)]).decode()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every rank, by rank; all of one shape."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values, group=self._group)
        return gathered

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, on the host, summed over all ranks in place."""
        dist.all_reduce(values, group=self._group)
        return values

    def send_text(self, text: str, to: int) -> None:
        """Send a text to a rank that calls `receive_text`."""
        data = text.encode()
        dist.send(torch.tensor([len(data)]), to, group=self._group)
        dist.send(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8), to, group=self._group)

    def receive_text(self, source: int) -> str:
        """The text that a rank sends with `send_text`."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
        dist.recv(data, source, group=self._group)
        return bytes(data.numpy().tobytes()[: int(size)]).decode()

    def run_on_all(self, function: Callable[[], _T]) -> _T:
        """Call a function on every rank; if it fails on any, all raise."""
        try:
            value = function()
        except Exception as error:  # whatever it is, the other ranks must raise too
            self.start_agreement(error).wait()
            raise
        self.start_agreement(None).wait()
        return value

    def raise_on_all(self, error: Exception | None, source: int) -> None:
        """Raise the error of rank `source` on every rank; all of them know that it has one.

        That rank raises its own exception; the others one of the same kind and message.
        """
        name = "" if error is None else type(error).__name__
        text = self.broadcast_text(f"{name}: {error}", source=source)
        if self.rank == source:
            assert error is not None
            raise error
        raise _same_kind(text, source) from error

    def start_agreement(self, error: Exception | None) -> "Agreement":
        """Start telling the other ranks whether this one has an error; `Agreement.wait` on all ranks ends it."""
        return Agreement(self, self._group, error)


class Agreement:
    """An asynchronous reduction: does any rank have an error? The lowest such rank's is raised on all."""

    def __init__(self, control: ControlGroup, group: dist.ProcessGroup, error: Exception | None) -> None:
        self._control = control
        self._error = error
        world = dist.get_world_size(group)
        self._code = torch.tensor([0 if error is None else world - control.rank])
        self._world = world
        work = dist.all_reduce(self._code, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self) -> None:
        """Return if no rank had an error; else raise the lowest failing rank's, on every rank.

        That rank raises its own exception; the others one of the same message.
        """
        self._work.wait()
        if code := int(self._code):
            self._control.raise_on_all(self._error, self._world - code)


def _same_kind(text: str, source: int) -> DynaPipeError:
    name, _, message = text.partition(": ")
    kinds = {kind.__name__: kind for kind in _subclasses(DynaPipeError)}
    return kinds.get(name, PlannerFailedError)(
        f"rank {source}: {message}" if name in kinds else f"rank {source}: {text}"
    )


def _subclasses(kind: type[DynaPipeError]) -> list[type[DynaPipeError]]:
    return [kind, *(s for direct in kind.__subclasses__() for s in _subclasses(direct))]
