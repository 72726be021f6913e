"""One candidate's plan of one batch, in this process or in others."""

import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Protocol, Self

import msgspec

from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.errors import DynaPipeError, PlanningError
from megatron_dynapipe.plan.memory import peak_bytes
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch

PLAN_DEADLINE_S = 600.0
"""Within which one of the plans under way must be done."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate comes to on one batch.

    Attributes:
        predicted_ns: forward, backward and transfers; 0 with an error.
        peak_bytes: on every pipeline rank, of the replica that needs most.
        error: why there is no plan.
    """

    predicted_ns: int = 0
    peak_bytes: tuple[int, ...] = ()
    error: str | None = None


class Judge:
    """Plans batches under settings; a planner is made once for each settings."""

    def __init__(self, cost_model: CostModel, batches: Sequence[GlobalBatch]) -> None:
        self._cost_model, self._batches = cost_model, list(batches)
        self._planners: dict[PlannerSettings, Planner] = {}

    def __call__(self, settings: PlannerSettings, batch: int) -> Outcome:
        """The plan of a batch, or why there is none."""
        try:
            if settings not in self._planners:
                self._planners[settings] = Planner(settings, self._cost_model)
            plan = self._planners[settings].plan(self._batches[batch], batch)
        except DynaPipeError as error:
            return Outcome(error=error.message)
        peaks = [
            max(peak_bytes(plan, replica, stage) for replica in plan.replicas) for stage in range(plan.pipeline_stages)
        ]
        return Outcome(predicted_ns=plan.totals.predicted_ns, peak_bytes=tuple(peaks))


class Runner(Protocol):
    """Where plans are made: some at a time, their outcomes in the order in which they are done."""

    @property
    def running(self) -> int:
        """Plans under way."""

    @property
    def free(self) -> bool:
        """Whether another may be started."""

    def start(self, candidate: int, settings: PlannerSettings, batch: int) -> None:
        """Plan a batch for a candidate."""

    def next(self) -> tuple[int, int, Outcome]:
        """Wait for one of them: candidate, batch, outcome."""


class Inline:
    """Plans in this process, one after another."""

    def __init__(self, cost_model: CostModel, batches: Sequence[GlobalBatch]) -> None:
        self._judge = Judge(cost_model, batches)
        self._waiting: list[tuple[int, PlannerSettings, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()

    @property
    def running(self) -> int:
        """See `Runner`."""
        return len(self._waiting)

    @property
    def free(self) -> bool:
        """See `Runner`."""
        return not self._waiting

    def start(self, candidate: int, settings: PlannerSettings, batch: int) -> None:
        """See `Runner`."""
        self._waiting.append((candidate, settings, batch))

    def next(self) -> tuple[int, int, Outcome]:
        """See `Runner`."""
        candidate, settings, batch = self._waiting.pop()
        return candidate, batch, self._judge(settings, batch)


_judge: Judge | None = None
"""A worker process's own."""


def _begin(cost_model: CostModel, batches: Sequence[GlobalBatch]) -> None:
    global _judge
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that searches.
    _judge = Judge(cost_model, batches)


def _run(settings: PlannerSettings, batch: int) -> Outcome:
    assert _judge is not None
    return _judge(settings, batch)


class Workers:
    """Plans in processes of their own, as many at a time as there are processes."""

    def __init__(self, cost_model: CostModel, batches: Sequence[GlobalBatch], workers: int) -> None:
        self._pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(cost_model, list(batches))
        )
        self._workers = workers
        self._futures: dict[Future[Outcome], tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def running(self) -> int:
        """See `Runner`."""
        return len(self._futures)

    @property
    def free(self) -> bool:
        """See `Runner`."""
        return len(self._futures) < self._workers

    def start(self, candidate: int, settings: PlannerSettings, batch: int) -> None:
        """See `Runner`."""
        self._futures[self._pool.submit(_run, settings, batch)] = (candidate, batch)

    def next(self) -> tuple[int, int, Outcome]:
        """See `Runner`.

        Raises:
            PlanningError: a process has ended, or no plan is done within `PLAN_DEADLINE_S`.
        """
        done, _ = wait(self._futures, timeout=PLAN_DEADLINE_S, return_when=FIRST_COMPLETED)
        if not done:
            raise PlanningError(
                f"none of {len(self._futures)} plans was done within {PLAN_DEADLINE_S:.0f} s",
                hint="use fewer batches, or fewer samples in a batch",
            )
        future = min(done, key=lambda each: self._futures[each])
        candidate, batch = self._futures.pop(future)
        try:
            return candidate, batch, future.result()
        except BrokenProcessPool as error:
            raise PlanningError(
                "a process that plans has ended", hint="is the host out of memory? try --workers 1"
            ) from error
