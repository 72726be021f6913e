"""Bytes of all ranks, exchanged over a tree of small gloo groups: no rank has a connection to every other.

    0 1 2 … 7    8 9 … 15    …    64 65 … 71      neighbours in eights: a node's ranks
    0            8 …              64              the first of each, in eights: nodes
    0                             64              and so on, up to one group

A rank is in as many groups as it is the first of, and one more: 4,096 ranks have 28 connections at most. Up, firsts
join what their groups send; down, they pass on what all have.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynapipe.runtime.process_groups import group_of_each

WIDTH = 8
"""Ranks of a group: as many as most nodes have, whose ranks follow one another."""


class RankTree:
    """Exchanges over all ranks, in the order in which they are started, the same on every rank, by a thread.

    What is started runs while its rank goes on. A rank that does not come lets the first of its group wait for
    `timeout_s`, and the others with it.

    Args:
        timeout_s: a rank that does not take part for this long fails the others.

    Attributes:
        groups: of torch that this rank is in, the lowest first.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._levels: list[tuple[range, dist.ProcessGroup]] = []
        span = 1
        while span < self.size:
            firsts = range(0, self.size, span * WIDTH)
            lists = [range(first, min(first + span * WIDTH, self.size), span) for first in firsts]
            group = group_of_each(lists, backend="gloo", timeout_s=timeout_s)
            if group is not None:
                self._levels.append((lists[self.rank // (span * WIDTH)], group))
            span *= WIDTH
        self.groups = [group for _, group in self._levels]
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # a daemon: the interpreter's end does not wait for a rank that does not come
        threading.Thread(target=_work, args=[self._jobs], name="rank-tree", daemon=True).start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def close(self) -> None:
        """Leave the groups. Nothing is under way."""
        self._end()
        for group in self.groups:
            dist.destroy_process_group(group)

    def start_gather(self, data: torch.Tensor, sizes: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Start to join bytes of all ranks, by rank; `sizes` says how many of each. What is returned waits for them."""
        return self._start(lambda: self._down(self._up(data, sizes), sum(sizes)))

    def collect(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """On rank 0 the bytes of all ranks, by rank; on the others some of them."""
        return self._start(lambda: self._up(data, sizes))()

    def broadcast(self, data: torch.Tensor, *, source: int) -> torch.Tensor:
        """The bytes of rank `source`; on the others `data` is as large, and overwritten."""

        def run() -> torch.Tensor:
            for ranks, group in self._levels:  # up to rank 0
                holder = source - source % ranks.step
                if holder == self.rank != ranks[0]:
                    dist.send(data, group=group, group_dst=0)
                elif self.rank == ranks[0] != holder and holder in ranks:
                    dist.recv(data, group=group, group_src=ranks.index(holder))
            return self._down(data, data.numel())

        return self._start(run)()

    def _up(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """What this rank has and those that it is the first of, which leaves it for its own first."""
        for ranks, group in self._levels:
            if self.rank != ranks[0]:
                if data.numel():
                    dist.send(data, group=group, group_dst=0)
                break
            parts = [torch.empty(sum(sizes[rank : rank + ranks.step]), dtype=torch.uint8) for rank in ranks[1:]]
            sent = [(place, part) for place, part in enumerate(parts, 1) if part.numel()]
            for work in [dist.irecv(part, group=group, group_src=place) for place, part in sent]:
                assert work is not None, "this rank is in the group"
                work.wait()
            data = torch.cat([data, *parts])
        return data

    def _down(self, data: torch.Tensor, size: int) -> torch.Tensor:
        """The `size` bytes that rank 0 has, on every rank."""
        if self.rank and data.numel() != size:
            data = torch.empty(size, dtype=torch.uint8)
        for group in reversed(self.groups if size else []):
            dist.broadcast(data, group=group, group_src=0)
        return data

    def _start[T](self, run: Callable[[], T]) -> Callable[[], T]:
        future = Future[T]()
        self._jobs.put(lambda: _fulfil(future, run))
        return future.result


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while job := jobs.get():
        job()
        del job  # which would keep the tree while the next is waited for


def _fulfil(future: Future[Any], run: Callable[[], Any]) -> None:
    try:
        future.set_result(run())
    except BaseException as error:  # noqa: BLE001  (raised where the result is asked for)
        future.set_exception(error)
