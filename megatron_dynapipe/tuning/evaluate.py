"""Plans of candidates on batches, in this process or in several."""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Self, override

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
    """What a candidate's plan of one batch takes.

    Attributes:
        predicted_ns: forward, backward and transfers; 0 with an error.
        peak_bytes: on every pipeline rank, of the replica that needs most.
        error: why there is no plan.
    """

    predicted_ns: int = 0
    peak_bytes: tuple[int, ...] = ()
    error: str | None = None


class Evaluator:
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
            max(peak_bytes(plan, replica, stage, settings.element_bytes) for replica in plan.replicas)
            for stage in range(plan.pipeline_stages)
        ]
        return Outcome(predicted_ns=plan.totals.predicted_ns, peak_bytes=tuple(peaks))


_evaluator: Evaluator | None = None
"""A worker process's own."""


def _begin(evaluator: Evaluator) -> None:
    global _evaluator
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that searches.
    _evaluator = evaluator


def _evaluate(settings: PlannerSettings, batch: int) -> Outcome:
    assert _evaluator is not None
    return _evaluator(settings, batch)


class _ThisProcess(Executor):
    @override
    def submit[**P, R](self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Workers:
    """Evaluates as many plans at a time as there are processes; with one, in this process.

    Args:
        cost_model: what layers cost.
        batches: to plan.
        workers: processes.
    """

    def __init__(self, cost_model: CostModel, batches: Sequence[GlobalBatch], workers: int) -> None:
        evaluator = Evaluator(cost_model, batches)
        self._executor: Executor = _ThisProcess()
        self._evaluate: Callable[[PlannerSettings, int], Outcome] = evaluator
        if workers > 1:
            context = get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(evaluator,))
            self._evaluate = _evaluate
        self._workers = workers
        self._futures: dict[Future[Outcome], tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def running(self) -> int:
        """Plans under way."""
        return len(self._futures)

    @property
    def free(self) -> bool:
        """Whether another may be started."""
        return len(self._futures) < self._workers

    def start(self, candidate: int, settings: PlannerSettings, batch: int) -> None:
        """Plan a batch for a candidate."""
        self._futures[self._executor.submit(self._evaluate, settings, batch)] = (candidate, batch)

    def next(self) -> tuple[int, int, Outcome]:
        """Wait for one of the plans: candidate, batch, outcome.

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
                "a planning process ended", hint="is the host out of memory? try --workers 1"
            ) from error
