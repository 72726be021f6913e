"""Encoding blocks on several processes, the results in the order of the blocks.

blocks ──► worker 0 ──┐
       ──► worker 1 ──┼──► results in order     at most two blocks per worker are on their way
       ──► worker 2 ──┘
"""

import contextlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import msgspec

from megatron_dynapipe.data.mixture.rows import Block
from megatron_dynapipe.data.prepare.encode import EncodedBlock, Encoder, WorkOrder
from megatron_dynapipe.data.prepare.frames import Done, Job, receive, send
from megatron_dynapipe.errors import DataError

_AHEAD = 2


class WorkerEndedError(DataError):
    """A process that tokenises has ended; what was done before is kept."""


def encoded_here(order: WorkOrder, jobs: Iterable[tuple[int, Block]]) -> Iterator[tuple[Block, EncodedBlock]]:
    """Each block with its samples, in this process: for little text."""
    encoder = Encoder(order)
    for task, block in jobs:
        yield block, encoder(block, task)


def encoded_by(
    workers: int, order: WorkOrder, jobs: Iterable[tuple[int, Block]]
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Each block with its samples, in order, from this many processes.

    Raises:
        DataError: a row cannot be used.
        WorkerEndedError: a worker has ended.
    """
    with ExitStack() as stack:
        free: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(workers):
            free.put(stack.enter_context(_Worker(order)))
        # One thread per worker waits for its replies; leaving kills the workers first, which ends the waits.
        threads = ThreadPoolExecutor(workers)
        stack.push(lambda *_: threads.shutdown(wait=False, cancel_futures=True))
        waiting: deque[tuple[Block, Future[EncodedBlock]]] = deque()
        for task, block in jobs:
            waiting.append((block, threads.submit(_encode, free, task, block)))
            if len(waiting) >= _AHEAD * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()


def _encode(free: "SimpleQueue[_Worker]", task: int, block: Block) -> EncodedBlock:
    worker = free.get()
    try:
        return worker.encode(task, block)
    finally:
        free.put(worker)


class _Worker:
    """One process, as a context manager."""

    def __init__(self, order: WorkOrder) -> None:
        self._order = order

    def __enter__(self) -> "_Worker":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dynapipe.data.prepare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        self._tell(msgspec.msgpack.encode(self._order))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent yet is lost
                    pipe.close()

    def encode(self, task: int, block: Block) -> EncodedBlock:
        """A block's samples; raises DataError as the worker says."""
        assert self._process.stdout is not None
        self._tell(msgspec.msgpack.encode(Job(task=task, block=block)))
        reply = receive(self._process.stdout)
        if reply is None:
            raise self._ended()
        done = msgspec.msgpack.decode(reply, type=Done)
        if done.encoded is None:
            raise DataError(done.error or "expected samples, got none", hint=done.hint)
        return done.encoded

    def _tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, data)
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> WorkerEndedError:
        return WorkerEndedError(
            f"expected a process to tokenise, it ended (status {self._process.poll()})",
            hint="its output is above; memory may have run out: try --workers 1. What is done is kept",
        )
