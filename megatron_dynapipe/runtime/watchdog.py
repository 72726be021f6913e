"""Reports the instruction at which a device hangs, before the process group's own deadline ends the process.

A wait for NCCL does not raise where it is called: it makes the device's stream wait, the host runs ahead, and when the
group's deadline has passed, NCCL's watchdog aborts the process with a message that does not mention the plan.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Self

import torch

from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.plan.text import point_at
from megatron_dynapipe.runtime.trace import Trace

DEADLINE_FRACTION = 0.8
"""Fraction of the deadline after which a device that makes no progress is reported."""


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Watchdog:
    """A thread that watches the list in execution, from `PipelineExecutor(watch=…)`. A context manager.

    Args:
        deadline_s: of the process groups.
        name: of this rank, for the message.
        tell: takes the message; standard error by default.
        begin: called in the thread before it looks at a device.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        name: str,
        tell: Callable[[str], None] = _to_stderr,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._patience_s = deadline_s * DEADLINE_FRACTION
        self._name = name
        self._tell = tell
        self._begin = begin
        self._watched: tuple[StagePlan, Trace] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynapipe-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def __call__(self, plan: StagePlan, trace: Trace) -> None:
        """Watch this list from now on."""
        self._watched = plan, trace

    def _run(self) -> None:
        self._begin()
        standing: tuple[Trace, int] | None = None
        since = time.monotonic()
        told = False
        while not self._closed.wait(self._patience_s / 20):
            if (watched := self._watched) is None:
                continue
            plan, trace = watched
            place = trace, trace.reached()
            if place != standing:
                standing, since, told = place, time.monotonic(), False
            elif not told and place[1] < len(plan.instructions) and time.monotonic() - since > self._patience_s:
                told = True
                where = point_at(plan.instructions, place[1])
                self._tell(
                    f"[{self._name}] no progress for {self._patience_s:g} s at stage {plan.stage}, step {place[1]}: "
                    f'{where} (if all stages say so: docs/parallelism.md, "What waits for a whole GPU")'
                )


def watched(device: torch.device, *, deadline_s: float, rank: int) -> AbstractContextManager[Watchdog | None]:
    """A watchdog for the lists of a rank on CUDA; None elsewhere, where a wait that expires raises an error itself.

    Args:
        device: of the rank.
        deadline_s: of its process groups.
        rank: its number, for the message.
    """
    if device.type != "cuda":
        return nullcontext()
    # A thread begins with device 0 as its current one: asking an event there would make a context on it for every rank.
    return Watchdog(deadline_s=deadline_s, name=f"rank {rank}", begin=partial(torch.cuda.set_device, device))
