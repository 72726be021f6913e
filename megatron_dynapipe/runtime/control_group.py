"""Agreement of all ranks over gloo groups of its own: one text for all, one error for all.

Up to `WIDTH` ranks are one group. More are groups of neighbours, whose first ranks are groups again, up to one group:

    0 1 … 63    64 65 … 127    …        rows of neighbours are joined while ranks go on
    0           64             …        their first ranks join them where they ask for the result, and pass it back

No thread does so: a rank's wait lasts until the first ranks ask, too. A rank whose wait fails, by its deadline or by a
lost connection, breaks all its groups, so that those that wait for it fail at once, and theirs after them.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import DynaPipeError, PlanError, PlannerFailedError
from megatron_dynapipe.runtime.process_groups import break_groups, group_of_each

_T = TypeVar("_T")
WIDTH = 64
"""Ranks of a group: 4,096 ranks have at most 126 connections each."""
_IDENTITY = 16
"""Bytes of a step's identity that ranks compare."""
_NO_CHECKSUM = bytes(4)
_ROW = _IDENTITY + 2 + len(_NO_CHECKSUM)
AGREED = "dynapipe_agreed"
"""Attribute of an error that all ranks raise at the same point."""
_DIGITS = 15
"""Hexadecimal digits of a plan's digest in a message."""


class ControlGroup:
    """All ranks, for small exchanges on the CPU. Every rank makes it, and calls its methods, in the same order.

    Args:
        timeout_s: a rank that does not take part for this long fails the others.

    Attributes:
        rank, size: this rank, and their number.
        groups: of torch that this rank is in.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._levels: list[tuple[range, dist.ProcessGroup]] = []  # this rank's, from its neighbours' up
        step = 1
        while step < self.size:
            span = step * WIDTH
            lists = [range(first, min(first + span, self.size), step) for first in range(0, self.size, span)]
            group = group_of_each(lists, backend="gloo", timeout_s=timeout_s)
            if group is not None:
                self._levels.append((lists[self.rank // span], group))
            step = span
        self.groups = [group for _, group in self._levels]
        self._under_way: Callable[[], object] = list

    def close(self) -> None:
        """Leave the groups."""
        for group in self.groups:
            dist.destroy_process_group(group)

    def broadcast_text(self, text: str, *, source: int = 0) -> str:
        """`text` of rank `source`, on every rank."""
        content = _ended(text.encode())
        size = torch.tensor([len(content)])
        self._together(lambda: self._broadcast(size, source))
        if self.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._together(lambda: self._broadcast(content, source))
        return _without_end(content).decode()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every rank, by rank; all of one shape."""
        return list(self.start_gather(values)())

    def gather_texts(self, text: str) -> list[str]:
        """`text` of every rank, by rank."""
        collected = [part.decode() for part in self.collect(text.encode())]
        texts: list[str] = json.loads(self.broadcast_text(json.dumps(collected)))
        return texts

    def collect(self, data: bytes) -> list[bytes]:
        """On rank 0 `data` of every rank, by rank, each sent in its own size; on the others nothing."""
        content = _ended(data)
        sizes = [int(size) for size in self.gather(torch.tensor(len(content)))]
        joined = self._together(lambda: self._join(content, sizes))
        if self.rank != 0:
            return []
        return [_without_end(part) for part in joined.split(sizes)]

    def start_gather(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start `gather`; call what is returned for its rows, by rank. The start of another exchange waits for it."""
        self._under_way()
        rows, work = self._start_rows(values[None], 0)

        @functools.cache
        def finish() -> torch.Tensor:
            self._under_way = list
            return self._guarded(lambda: self._finish_rows(rows, work))

        self._under_way = finish
        return finish

    def start_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum `values`, on the host, over all ranks; call what is returned for the sum."""
        rows = self.start_gather(values)
        return lambda: rows().sum(0, dtype=values.dtype)

    def _together(self, exchange: Callable[[], _T]) -> _T:
        """The result of an exchange that begins when the one under way has ended."""
        self._under_way()
        return self._guarded(exchange)

    def _guarded(self, exchange: Callable[[], _T]) -> _T:
        try:
            return exchange()
        except Exception:
            break_groups(self.groups)  # whoever waits for this rank does not wait any longer
            raise

    def _start_rows(self, rows: torch.Tensor, level: int) -> tuple[torch.Tensor, dist.Work | None]:
        """Start to join the rows of a level's ranks, each of as many; with it the rows that will hold them."""
        if level == len(self._levels):
            return rows, None
        ranks, group = self._levels[level]
        joined = rows.new_empty(len(ranks), ranks.step, *rows.shape[1:])
        own = rows.new_zeros(joined.shape[1:])
        own[: len(rows)] = rows  # the last group may have fewer
        work = self._guarded(lambda: dist.all_gather(list(joined), own, group=group, async_op=True))
        joined = joined.flatten(0, 1)
        return joined[: self.size - ranks[0]], work

    def _finish_rows(self, rows: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
        for level, (ranks, _) in enumerate(self._levels, 1):
            assert work is not None, "this rank is in the group"
            work.wait()
            if self.rank == ranks[0]:
                rows, work = self._start_rows(rows, level)
        if len(rows) < self.size:
            rows = rows.new_empty(self.size, *rows.shape[1:])
        for ranks, group in reversed(self._levels):
            is_highest = ranks.step * WIDTH >= self.size
            if not is_highest:
                dist.broadcast(rows, group=group, group_src=0)
        return rows

    def _broadcast(self, data: torch.Tensor, source: int) -> None:
        """`data` of rank `source`, into that of the others: up to the first ranks above it, then down to the others."""
        down = []
        for ranks, group in self._levels:
            holder = source - source % ranks.step
            if holder in ranks:
                dist.broadcast(data, group=group, group_src=ranks.index(holder))
            else:
                down.append(group)
        for group in reversed(down):
            dist.broadcast(data, group=group, group_src=0)

    def _join(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """On rank 0 the bytes of all ranks, one after another; on the others some of them."""
        for ranks, group in self._levels:
            if self.rank != ranks[0]:
                dist.send(data, group=group, group_dst=0)
                break
            parts = [data]
            for place, rank in enumerate(ranks[1:], 1):
                size = sum(sizes[rank : rank + ranks.step])
                part = torch.empty(size, dtype=torch.uint8)
                dist.recv(part, group=group, group_src=place)
                parts.append(part)
            data = torch.cat(parts)
        return data

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
        data = self._rows().numpy().tobytes()
        rows = [data[start : start + _ROW] for start in range(0, len(data), _ROW)]
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


def _ended(data: bytes) -> torch.Tensor:
    """The bytes, and one more: a tensor of none is not sent."""
    return torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)


def _without_end(content: torch.Tensor) -> bytes:
    return content.numpy()[:-1].tobytes()


def _same_kind(text: str, source: int) -> DynaPipeError:
    name, _, message = text.partition(": ")
    kinds = {kind.__name__: kind for kind in _subclasses(DynaPipeError)}
    return kinds.get(name, PlannerFailedError)(
        f"rank {source}: {message}" if name in kinds else f"rank {source}: {text}"
    )


def _subclasses(kind: type[DynaPipeError]) -> list[type[DynaPipeError]]:
    return [kind, *(s for direct in kind.__subclasses__() for s in _subclasses(direct))]
