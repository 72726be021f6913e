"""Agreement of all ranks over a gloo group of its own: one text for all, one error for all."""

import datetime
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import DynaPipeError, PlanError, PlannerFailedError

_T = TypeVar("_T")
_IDENTITY = 16
"""Bytes of a step's identity that ranks compare."""
_NO_CHECKSUM = bytes(4)
AGREED = "dynapipe_agreed"
"""Attribute of an error that all ranks raise at the same point."""
_DIGITS = 15
"""Hexadecimal digits of a plan's digest in a message."""


class ControlGroup:
    """A CPU process group over all ranks. Every rank makes it, and calls its methods, in the same order.

    Args:
        timeout_s: a rank that does not take part for this long fails the others.

    Attributes:
        group: of torch.
        rank, size: this rank, and their number.
    """

    def __init__(self, *, timeout_s: float) -> None:
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "it has all ranks"
        self.group = group
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def broadcast_text(self, text: str, *, source: int = 0) -> str:
        """`text` of rank `source`, on every rank."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, source, group=self.group)
        if self.rank != source:
            data = torch.zeros(max(int(size), 1), dtype=torch.uint8)
        dist.broadcast(data, source, group=self.group)
        return bytes(data.numpy().tobytes()[: int(size)]).decode()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every rank, by rank; all of one shape."""
        return self.start_gather(values)()

    def gather_texts(self, text: str) -> list[str]:
        """`text` of every rank, by rank."""
        data = text.encode()
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        rows = self.gather(padded)
        return [bytes(row.numpy().tobytes()[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def collect(self, data: bytes) -> list[bytes]:
        """On rank 0 `data` of every rank, by rank, each received in its own size; on the others nothing."""
        size = torch.tensor([len(data)])
        content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        if self.rank != 0:
            dist.send(size, 0, group=self.group)
            dist.send(content, 0, group=self.group)
            return []
        collected = [data]
        for rank in range(1, self.size):
            dist.recv(size, rank, group=self.group)
            content = torch.empty(max(int(size), 1), dtype=torch.uint8)
            dist.recv(content, rank, group=self.group)
            collected.append(content.numpy().tobytes()[: int(size)])
        return collected

    def start_gather(self, values: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Start `gather`; call what is returned for its result."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        work = dist.all_gather(gathered, values, group=self.group, async_op=True)
        return lambda: _after(work, gathered)

    def start_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum `values`, on the host, over all ranks; call what is returned for the sum."""
        work = dist.all_reduce(values, group=self.group, async_op=True)
        return lambda: _after(work, values)

    def run_on_all(self, function: Callable[[], _T]) -> _T:
        """Call a function on every rank; if it fails on any, all raise."""
        try:
            value = function()
        except Exception as error:  # whatever it is, the other ranks must raise too
            self.start_agreement(error).settle()
            raise
        self.start_agreement(None).settle()
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

    def start_agreement(self, error: Exception | None, *, plan: str = "", what: str = "") -> "StepAgreement":
        """Start to agree with all ranks on a plan that they are about to run.

        Args:
            error: what keeps this rank from it.
            plan: the plan's hexadecimal digest.
            what: the plan is of, for the message.
        """

        def differ(group: Sequence[int], other: int, digests: Sequence[bytes]) -> PlanError:
            one, another = (f"{digests[rank].hex()[:_DIGITS]}… on rank {rank}" for rank in (group[0], other))
            return PlanError(
                f"expected one plan of {what} on all ranks: the digest of its plan is {one} and {another}",
                hint="two jobs share a name in the plan store, or a rank runs another version of this package",
            )

        return StepAgreement(self, error, identity=bytes.fromhex(plan[: 2 * _IDENTITY]), differ=differ)


class StepAgreement:
    """One exchange of all ranks, under way while they work: can each of them run the step, and is it the same step?

        rank 0   start ── F0 ── settle ── SEND_F0 …        the exchange runs while the first passes do
        rank 1   start ── settle ── RECV_F0 …

    Every rank makes it and settles it, in the same order as the others.

    Args:
        control: of all ranks.
        error: why this rank cannot run the step.
        identity: of the step, 16 bytes; shorter ones are filled up with zeros.
        alike: groups of ranks whose identities must be equal; by default one group of all.
        checksum: of the step's values, 4 bytes; must be equal too, among those that have one.
        differ: the error where they are not, from such a group, the first rank that differs from the group's first,
            and the identities of all ranks.
        new: this rank has to learn something together with the others before it can run the step.
        learn: does so; called on every rank if any has to.

    Attributes:
        is_settled: whether `settle` has been called.
        identities: of all ranks, by rank, once it has returned.
    """

    def __init__(
        self,
        control: ControlGroup,
        error: Exception | None,
        *,
        identity: bytes,
        differ: Callable[[Sequence[int], int, Sequence[bytes]], DynaPipeError],
        alike: Sequence[Sequence[int]] = (),
        checksum: bytes = _NO_CHECKSUM,
        new: bool = False,
        learn: Callable[[], object] = lambda: None,
    ) -> None:
        self._control = control
        self._error = error
        self._differ = differ
        self._learn = learn
        self._alike = alike or [range(control.size)]
        row = [*identity[:_IDENTITY].ljust(_IDENTITY, b"\0"), error is not None, new, *checksum]
        self._rows = control.start_gather(torch.tensor(row, dtype=torch.uint8))
        self._after: list[Callable[[], None]] = []
        self.is_settled = False
        self.identities: Sequence[bytes] = ()

    def settle(self) -> None:
        """Return once every rank is known to be able to run the step; else raise, on every rank.

        The lowest failing rank raises its own exception; the others one of the same message.
        """
        if self.is_settled:
            return
        self.is_settled = True
        rows = [bytes(row.tolist()) for row in self._rows()]
        try:
            self._compare(rows)
        except Exception as error:
            setattr(error, AGREED, True)
            raise
        if any(row[_IDENTITY + 1] for row in rows):
            self._control.run_on_all(self._learn)
        for function in self._after:
            function()

    def _compare(self, rows: Sequence[bytes]) -> None:
        """Raise what keeps a rank from the step, or what ranks differ in."""
        if failing := [rank for rank, row in enumerate(rows) if row[_IDENTITY]]:
            self._control.raise_on_all(self._error, failing[0])
        self.identities = identities = [row[:_IDENTITY] for row in rows]
        for group in self._alike:
            if others := [rank for rank in group if identities[rank] != identities[group[0]]]:
                raise self._differ(group, others[0], identities)
            checked = [rank for rank in group if rows[rank][_IDENTITY + 2 :] != _NO_CHECKSUM]
            if others := [rank for rank in checked if rows[rank][_IDENTITY + 2 :] != rows[checked[0]][_IDENTITY + 2 :]]:
                raise self._differ(checked, others[0], identities)

    def then(self, function: Callable[[], None]) -> None:
        """Call a function once the agreement is settled."""
        if self.is_settled:
            function()
        else:
            self._after.append(function)


def _after[T](work: dist.Work | None, result: T) -> T:
    assert work is not None, "this rank is in the group"
    work.wait()
    return result


def _same_kind(text: str, source: int) -> DynaPipeError:
    name, _, message = text.partition(": ")
    kinds = {kind.__name__: kind for kind in _subclasses(DynaPipeError)}
    return kinds.get(name, PlannerFailedError)(
        f"rank {source}: {message}" if name in kinds else f"rank {source}: {text}"
    )


def _subclasses(kind: type[DynaPipeError]) -> list[type[DynaPipeError]]:
    return [kind, *(s for direct in kind.__subclasses__() for s in _subclasses(direct))]
