"""A rank's iterator over planned iterations, fetched and collated ahead of training.

On GPUs the thread copies a micro-batch's tensors into one pinned buffer; they become views of it. A copy to the
device from other memory waits for the device's work, and pinning takes time of the host: here it is not the training
thread's.

    tokens | labels | loss mask | lengths      each begins at a multiple of 16 bytes
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from megatron_dynapipe.core.errors import DataError, StoreTimeoutError
from megatron_dynapipe.data.collate import Collator, HostMicroBatch
from megatron_dynapipe.store.entry import StageEntry

_CLOSE_SECONDS = 5.0
"""How long `close` waits for an unfinished fetch; its thread ends with the process in any case."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedIteration:
    """All that one rank needs for one iteration, on the host; running it twice runs the same plan on the same data.

    Attributes:
        entry: this rank's part of the plan.
        micro_batches: the replica's micro-batches, by index; it may have none.
        waited_seconds: how long training waited for this item.
    """

    entry: StageEntry
    micro_batches: tuple[HostMicroBatch, ...]
    waited_seconds: float = 0.0


class PlannedIterator:
    """Yields one `PlannedIteration` per training iteration, prepared ahead on a thread of its own.

    The thread starts with the first call of `next` or `await_next`. An error on it is raised by `next` with its own
    type, when the iteration it belongs to is due, and by every later `next`. `close` it at the end.

    Args:
        fetch: the rank's part of an iteration's plan; blocks until it is there, with a deadline of its own.
        collator: builds the host tensors.
        start_iteration: the first iteration to yield; a resumed run gives the one after its checkpoint.
        stop_iteration: the iteration before which to stop; None goes on for ever.
        ahead: how many iterations may be ready and waiting, at least 1.
        timeout_seconds: the longest that `next` waits, longer than the deadline of `fetch`.
        prepare: what else the thread does to each micro-batch (`pinning`).
    """

    def __init__(
        self,
        fetch: Callable[[int], StageEntry],
        collator: Collator,
        *,
        start_iteration: int = 0,
        stop_iteration: int | None = None,
        ahead: int = 2,
        timeout_seconds: float = 600.0,
        prepare: Callable[[HostMicroBatch], HostMicroBatch] = lambda batch: batch,
    ) -> None:
        self._fetch = fetch
        self._collator = collator
        self._prepared = prepare
        self._next_iteration = start_iteration
        self._stop_iteration = stop_iteration
        self._ahead = ahead
        self._timeout_seconds = timeout_seconds
        self._waited_seconds = 0.0
        # Shared with the thread, under the condition:
        self._changed = threading.Condition()
        self._ready: deque[PlannedIteration] = deque()
        self._error: BaseException | None = None
        self._doing = "start"
        self._closed = False
        self._thread = threading.Thread(target=self._prepare, name="dynapipe-prefetch", daemon=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedIteration:
        """The next iteration's item.

        Raises:
            StopIteration: the iteration before `stop_iteration` has been yielded.
            StoreTimeoutError: it was not ready within the deadline.
            DataError: the iterator is closed.
            Exception: whatever `fetch` or collation raised, as it was.
        """
        if self._next_iteration == self._stop_iteration:
            raise StopIteration
        error = self.await_next()
        if error is not None:
            raise error
        with self._changed:
            item = replace(self._ready.popleft(), waited_seconds=self._waited_seconds)
            self._changed.notify_all()
        self._next_iteration += 1
        self._waited_seconds = 0.0
        return item

    def await_next(self) -> BaseException | None:
        """Wait until `next` would not block; the error that it would raise, or None.

        Lets all ranks agree on whether the next iteration can begin before any of them begins it. The wait counts for
        the next item.
        """
        if self._next_iteration == self._stop_iteration:
            return None
        started = time.monotonic()
        with self._changed:
            if self._closed:
                return DataError(f"expected an open iterator for iteration {self._next_iteration}, it is closed")
            if self._thread.ident is None:
                self._thread.start()
            finished = self._changed.wait_for(
                lambda: self._ready or self._error is not None or self._closed, timeout=self._timeout_seconds
            )
            self._waited_seconds += time.monotonic() - started
            if self._ready:
                return None
            if not finished:
                return StoreTimeoutError(
                    f"expected iteration {self._next_iteration} to be ready within {self._timeout_seconds:g} s;"
                    f" still waiting for its thread to {self._doing}",
                    hint="look at the planner process and the plan store",
                )
            return self._error or DataError(f"iterator closed while waiting for iteration {self._next_iteration}")

    @property
    def next_plan_digest(self) -> str:
        """Digest of the plan that `next` would give without waiting; empty where it would not give one."""
        with self._changed:
            return self._ready[0].entry.plan_digest if self._ready else ""

    def close(self) -> None:
        """End the thread; no more items come. May be called more than once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _prepare(self) -> None:
        """The thread: prepare one iteration after another, while there is room, until it is closed."""
        iteration = self._next_iteration
        try:
            while iteration != self._stop_iteration and self._wait_for_room():
                item = self._prepare_one(iteration)
                with self._changed:
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
                iteration += 1
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another item may be prepared; False if the iterator is closed.

        Without a deadline: training may take as long as it likes over an iteration, and `close` ends the wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._ahead or self._closed)
            return not self._closed

    def _prepare_one(self, iteration: int) -> PlannedIteration:
        self._doing = f"fetch the plan of iteration {iteration}"
        entry = self._fetch(iteration)
        self._doing = f"read the samples of iteration {iteration}"
        batches = tuple(
            self._prepared(self._collator(index, micro_batch, entry.family))
            for index, micro_batch in enumerate(entry.micro_batches)
        )
        return PlannedIteration(entry=entry, micro_batches=batches)


ALIGNMENT = 16


def pinning(device: torch.device) -> Callable[[HostMicroBatch], HostMicroBatch]:
    """The part of the thread that reads ahead in each micro-batch of a run on a device."""
    if device.type != "cuda":
        return lambda batch: batch

    def pinned(batch: HostMicroBatch) -> HostMicroBatch:
        torch.cuda.set_device(device)  # pinned memory belongs to a context: not to one that this would make on device 0
        return in_one_buffer(batch, pin=True)

    return pinned


def in_one_buffer(batch: HostMicroBatch, *, pin: bool) -> HostMicroBatch:
    """The same micro-batch with all its tensors in one buffer."""
    rows = {name: row for name in ("input_segments", "decoder_segments") if (row := getattr(batch, name)) is not None}
    named = {field.name: value for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)}
    parts = ("offsets", "positions", "key_offsets", "key_places")
    tensors = [*named.values(), *(getattr(row, part) for row in rows.values() for part in parts)]
    copied = iter(gathered(tensors, pin=pin))
    changed: dict[str, Any] = dict(zip(named, copied, strict=False))
    changed |= {name: replace(row, **{part: next(copied) for part in parts}) for name, row in rows.items()}
    return replace(batch, **changed)


def gathered(tensors: Sequence[Tensor | None], *, pin: bool) -> list[Tensor | None]:
    """Copies of tensors as views of one buffer; None stays None."""
    sizes = [0 if tensor is None else -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    places = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin).split(sizes)
    return [
        None if tensor is None else place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for place, tensor in zip(places, tensors, strict=True)
    ]
