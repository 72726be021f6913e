"""Bytes from the first rank of a node to its others, over a gloo group of the node.

first    fetches or makes a plan ── PLAN, or ERROR ──► receive      one message to each rank, tagged by its split
         the run has ended       ── END ─────────────► receive      so that no thread waits for a message for ever
"""

import contextlib
import datetime
import enum
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import PlannerFailedError
from megatron_dynapipe.service.failure import decode_failure, encode_failure


class _Kind(enum.IntEnum):
    PLAN = 0
    ERROR = 1
    END = 2


class NodeGroup:
    """The ranks of one node. All of them make it; its methods may be called from several threads, one for each tag.

    Args:
        rank: this process's.
        firsts: for each rank of the job, whether it is the first of its node; ranks of a node follow one another.
        timeout_s: how long a rank waits for the node's first, or the first for a rank.

    Attributes:
        is_first: whether this is the rank that sends.
    """

    def __init__(self, rank: int, firsts: Sequence[bool], *, timeout_s: float) -> None:
        begins = [other for other, is_first in enumerate(firsts) if is_first or other == 0]
        timeout = datetime.timedelta(seconds=timeout_s)
        for ranks in map(range, begins, [*begins[1:], len(firsts)]):
            group = dist.new_group(list(ranks), timeout, backend="gloo")  # all ranks of the job make each
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup), "this rank is in it"
                self.ranks = ranks
                self._group = group
        self.is_first = rank == self.ranks[0]
        self._ended: list[tuple[object, torch.Tensor]] = []

    def give(self, tag: int, messages: Mapping[int, bytes]) -> None:
        """Send each other rank its plan's bytes; returns once all have them."""
        self._send(tag, _Kind.PLAN, {rank: messages[rank] for rank in self.ranks[1:]})

    def fail(self, tag: int, error: PlannerFailedError) -> None:
        """Let the other ranks raise this error."""
        self._send(tag, _Kind.ERROR, dict.fromkeys(self.ranks[1:], encode_failure(error)))

    def end(self, tag: int) -> None:
        """Tell ranks that still wait that nothing comes any more; does not wait for the others."""
        for rank in self.ranks[1:]:
            header = torch.tensor([_Kind.END, 0])
            with contextlib.suppress(RuntimeError):  # that rank has ended first, and waits for nothing
                self._ended.append((dist.isend(header, rank, group=self._group, tag=tag), header))

    def receive(self, tag: int) -> bytes:
        """The bytes that the first rank of the node sends next.

        Raises:
            PlannerFailedError: it could not get them, or the run has ended.
        """
        header = torch.empty(2, dtype=torch.int64)
        dist.recv(header, self.ranks[0], group=self._group, tag=tag)
        kind, size = header.tolist()
        if kind == _Kind.END:
            raise PlannerFailedError(f"rank {self.ranks[0]}, which fetches this node's plans, has ended")
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, self.ranks[0], group=self._group, tag=tag)
        content = data.numpy().tobytes()
        if kind == _Kind.ERROR:
            raise decode_failure(content)
        return content

    def _send(self, tag: int, kind: _Kind, messages: Mapping[int, bytes]) -> None:
        parts = [
            (rank, part)
            for rank, data in messages.items()
            for part in (torch.tensor([kind, len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8))
        ]
        for work in [dist.isend(part, rank, group=self._group, tag=tag) for rank, part in parts]:
            assert work is not None, "this rank is in the group"
            work.wait()
