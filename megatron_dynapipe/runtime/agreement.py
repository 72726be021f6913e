"""What all ranks agree on, over a gloo group that carries nothing else: one text for all, one failure for all."""

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_dynapipe.errors import DynaPipeError, PlannerFailedError


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

    def send_text(self, text: str, to: int) -> None:
        """Send a text to a rank that calls `receive_text`."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        dist.send(torch.tensor([len(text.encode())]), to, group=self._group)
        dist.send(data, to, group=self._group)

    def receive_text(self, source: int) -> str:
        """The text that a rank sends with `send_text`."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
        dist.recv(data, source, group=self._group)
        return bytes(data.numpy().tobytes()[: int(size)]).decode()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every rank, by rank; all of one shape."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values, group=self._group)
        return gathered

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """`values`, on the host, reduced over all ranks in place."""
        dist.all_reduce(values, op=op, group=self._group)
        return values

    def run_on_all[T](self, function: Callable[[], T]) -> T:
        """Call a function on every rank; if it fails on any, all raise."""
        try:
            value = function()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self.raise_on_all(error, self._failing(error))
            raise
        self.raise_on_all(None, self._failing(None))
        return value

    def raise_on_all(self, error: Exception | None, failing: int | None) -> None:
        """Raise the error of rank `failing` on every rank, if it is not None.

        That rank raises its own exception; the others one of the same kind and message.
        """
        if failing is None:
            return
        text = self.broadcast_text(f"{type(error).__name__}: {_text(error)}", source=failing)
        if self.rank == failing:
            assert error is not None
            raise error
        raise _same_kind(text, failing) from error

    def _failing(self, error: Exception | None) -> int | None:
        """The lowest rank that has an error."""
        code = self.reduce(torch.tensor([0 if error is None else self.size - self.rank]), dist.ReduceOp.MAX)
        return self.size - int(code) if int(code) else None


def _text(error: Exception | None) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _same_kind(text: str, source: int) -> DynaPipeError:
    name, _, message = text.partition(": ")
    kinds = {kind.__name__: kind for kind in _subclasses(DynaPipeError)}
    return kinds.get(name, PlannerFailedError)(
        f"rank {source}: {message}" if name in kinds else f"rank {source}: {text}"
    )


def _subclasses(kind: type[DynaPipeError]) -> list[type[DynaPipeError]]:
    return [kind, *(s for direct in kind.__subclasses__() for s in _subclasses(direct))]
