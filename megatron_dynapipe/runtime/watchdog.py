"""Watchdogs: threads that act where nothing has happened for too long.

A wait for NCCL does not raise where it is called: it makes the device's stream wait, the host runs ahead, and when the
group's deadline has passed, NCCL's watchdog aborts the process with a message that does not mention the plan. So
`ListWatchdog` reports the instruction at which the device stands before that happens. Calls of torch's store, on the
other hand, may wait for as long as TCP tries; a `Watchdog` ends a process whose peer is cut off.
"""

import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Self

import torch
import torch.distributed as dist

from megatron_dynapipe.core.executor import Trace
from megatron_dynapipe.core.instructions import point_at
from megatron_dynapipe.core.plan import StagePlan

DEADLINE_FRACTION = 0.8
"""Fraction of the process groups' deadline after which a device that makes no progress is reported."""
_LONGEST_POLL_S = 1.0
_WAITS = "dynapipe/waits"
"""Keys of the process groups' store, one of each rank that waits for too long."""
_ANSWER_S = 5.0


class Watchdog:
    """Calls a function once nobody has reset it in time; not armed until `reset`. A context manager, if it may end.

    Args:
        limit_s: after which it is called, in a thread of its own.
        late: what is called; the watchdog is disarmed by then.
        look: called in the thread many times within the limit; it may reset or disarm the watchdog.
        begin: called in the thread first.
    """

    def __init__(
        self,
        limit_s: float,
        late: Callable[[], None],
        *,
        look: Callable[[], None] = lambda: None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._limit_s = limit_s
        self._late = late
        self._look = look
        self._begin = begin
        self._due = math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynapipe-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def reset(self, more_s: float = 0.0) -> None:
        """Begin to count anew; `more_s` allows more time once."""
        self._due = time.monotonic() + self._limit_s + more_s

    def disarm(self) -> None:
        """Stop counting until the next `reset`."""
        self._due = math.inf

    def _watch(self) -> None:
        self._begin()
        while not self._closed.wait(min(_LONGEST_POLL_S, self._limit_s / 20)):
            self._look()
            if time.monotonic() >= self._due:
                self.disarm()
                self._late()


def silent_ranks() -> str:
    """Name the ranks of the job that do not say within some seconds that they wait, too; empty where all do.

    Every rank that waits for too long calls it; one that is stopped, or cut off, cannot.
    """
    if not dist.is_initialized():
        return ""
    with suppress(Exception):  # the store may be gone with the rank that hosts it
        store = dist.distributed_c10d._get_default_store()
        ranks = range(dist.get_world_size())
        store.set(f"{_WAITS}/{dist.get_rank()}", "")
        deadline = time.monotonic() + _ANSWER_S
        while silent := [rank for rank in ranks if not store.check([f"{_WAITS}/{rank}"])]:
            if time.monotonic() > deadline:
                return f"; no answer from rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            time.sleep(_ANSWER_S / 20)
    return ""


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class ListWatchdog(AbstractContextManager["ListWatchdog"]):
    """Reports the instruction at which a device stands still, once; give it to `PipelineExecutor(watch=…)`.

    Args:
        deadline_s: the process groups' deadline.
        name: this rank's, for the message.
        report: takes the message; standard error by default.
        begin: called in the watchdog's thread before it looks at a device.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        name: str,
        report: Callable[[str], None] = _to_stderr,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._report = report
        self._limit_s = deadline_s * DEADLINE_FRACTION
        self._watched: tuple[StagePlan, Trace] | None = None
        self._place: tuple[Trace, int] | None = None
        self._watchdog = Watchdog(self._limit_s, self._say_where, look=self._look, begin=begin)

    def __exit__(self, *error: object) -> None:
        self._watchdog.__exit__(None, None, None)

    def __call__(self, plan: StagePlan, trace: Trace) -> None:
        """Watch this list from now on."""
        self._watched = plan, trace

    def _look(self) -> None:
        if self._watched is None:
            return
        plan, trace = self._watched
        place = trace, trace.reached()
        if place != self._place:
            self._place = place
            if place[1] < len(plan.instructions):
                self._watchdog.reset()
            else:
                self._watchdog.disarm()

    def _say_where(self) -> None:
        assert self._watched is not None and self._place is not None, "armed by a look at a list"
        plan = self._watched[0]
        step = self._place[1]
        self._report(
            f"[{self._name}] no progress for {self._limit_s:g} s at stage {plan.stage}, step {step}: "
            f"{point_at(plan.instructions, step)}{silent_ranks()} "
            '(if all stages say so: docs/reliability.md, "What waits for a whole GPU")'
        )


def watched(device: torch.device, *, deadline_s: float, rank: int) -> AbstractContextManager[ListWatchdog | None]:
    """A watchdog for the lists of a rank on CUDA; None elsewhere, where a wait that expires raises an error itself."""
    if device.type != "cuda":
        return nullcontext()
    # A thread begins with device 0 as its current one: asking an event there would make a context on it for every rank.
    return ListWatchdog(deadline_s=deadline_s, name=f"rank {rank}", begin=partial(torch.cuda.set_device, device))
