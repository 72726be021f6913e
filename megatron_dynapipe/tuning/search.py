"""The best layouts of a space, found best first.

Every candidate begins with a bound, a time that no plan of its batches goes below. The candidate of the least bound
has its next batch planned in full, which raises its bound to what was predicted; and so on until the best `top`
candidates are planned on every batch and no other's bound is below theirs. So only plans are made that the answer
needs, and none is left out that could be in it.

    bound ──► plan batch 0 ──► bound ──► plan batch 1 ──► … ──► known          least bound first
"""

import enum
import heapq
import time
from collections.abc import Callable, Sequence

import msgspec

from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.errors import ConfigError, DynaPipeError
from megatron_dynapipe.planning.layer_split import choose_layer_split
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning.bounds import Work, least_ns, least_work
from megatron_dynapipe.tuning.judge import Inline, Outcome, Runner, Workers
from megatron_dynapipe.tuning.space import Candidate, Space, Split, candidates
from megatron_dynapipe.tuning.split import even_work_split
from megatron_dynapipe.tuning.step_costs import StepRates, step_ns
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS


class Status(enum.StrEnum):
    """What is known of a layout."""

    PLANNED = "planned"
    """Every batch was planned."""
    PARTIAL = "partial"
    """Some batches were planned before it was slower than the best, or the search was interrupted."""
    PRUNED = "pruned"
    """No batch was planned: it cannot be among the best, or the search was interrupted."""
    INFEASIBLE = "infeasible"


class TunedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout and what it comes to, in means over the batches that were planned.

    Attributes:
        data_parallel, tensor_parallel, pipeline_parallel, chunks: the layout.
        layers_per_stage: of every virtual stage; None where they were not chosen.
        layout: auto, padded or packed: what plans may make of a micro-batch.
        distributed_optimizer: whether optimizer state is sharded.
        status: what is known of it.
        batches: that were planned.
        predicted_ms: of an iteration: forward, backward, transfers, reduction, optimizer; None without a plan.
        reduction_ms, optimizer_ms: of these, gradient reduction and optimizer step.
        bound_ms: an iteration takes at least this.
        tokens_per_second: real tokens over predicted time.
        peak_memory_mb: of every pipeline rank.
        error: why it cannot be built, or a batch has no plan.
        measured_ms: of an iteration, where it was trained.
        measurement_error: why it was trained without a measurement.
    """

    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    layout: str
    distributed_optimizer: bool
    status: Status
    batches: int = 0
    predicted_ms: float | None = None
    reduction_ms: float | None = None
    optimizer_ms: float | None = None
    bound_ms: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: tuple[float, ...] = ()
    error: str | None = None
    measured_ms: float | None = None
    measurement_error: str | None = None


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """All layouts that were considered.

    Attributes:
        layouts: planned ones first, the fastest first; then partial and pruned ones, by their bounds; then infeasible
            ones.
        settings: the planner's settings of each.
        plans: that were made.
        seconds: that the search took.
        interrupted: whether Ctrl-C ended it.
    """

    layouts: tuple[TunedLayout, ...]
    settings: tuple[PlannerSettings, ...]
    plans: int
    seconds: float
    interrupted: bool = False


Progress = Callable[[int, int, float | None], None]
"""Called with plans made, plans that may be needed at most, and the best predicted time (ms) so far."""


class _Judged:
    """A candidate on its way."""

    def __init__(self, candidate: Candidate, works: Sequence[Work] | None) -> None:
        self.candidate, self.settings, self.error = candidate, candidate.settings, candidate.error
        self.outcomes: list[Outcome] = []
        self.bounds: list[int] = []
        self.reduction_ns = self.optimizer_ns = 0
        self.unsplit = candidate.split is Split.AUTO
        if works is not None:
            self.bounds = [least_ns(self.settings, work, any_split=self.unsplit) for work in works]

    @property
    def bound_ns(self) -> int:
        """Of all batches: what was planned, and bounds of the others."""
        planned = sum(outcome.predicted_ns for outcome in self.outcomes)
        ends = (self.reduction_ns + self.optimizer_ns) * len(self.bounds)
        return planned + sum(self.bounds[len(self.outcomes) :]) + ends

    @property
    def status(self) -> Status:
        if self.error is not None:
            return Status.INFEASIBLE
        if not self.outcomes:
            return Status.PRUNED
        return Status.PLANNED if len(self.outcomes) == len(self.bounds) else Status.PARTIAL


def tune(
    base: PlannerSettings,
    cost_model: CostModel,
    batches: Sequence[GlobalBatch],
    space: Space,
    *,
    rates: StepRates | None = None,
    top: int = 3,
    workers: int = 1,
    progress: Progress | None = None,
) -> Tuning:
    """The layouts under which batches are predicted to train fastest.

    Args:
        base: model, memory, links and the planner's choices; its layout is replaced.
        cost_model: what layers cost.
        batches: a sample of the global batches to come; all of them are planned for the best layouts.
        space: the layouts to try.
        rates: what gradient reduction and optimizer step take.
        top: how many of the best must be known for certain.
        workers: processes that plan; 1: this one.
        progress: called after every plan.

    Raises:
        ConfigError: no batch, or `top` or `workers` below 1.
        CostModelError: costs of another model.
        DataError: a sample is empty.
    """
    if not batches or top < 1 or workers < 1:
        raise ConfigError(
            f"expected at least one batch, best layout and process, got {len(batches)}, {top} and {workers}"
        )
    start = time.monotonic()
    judged = _judged(candidates(base, space, cost_model), cost_model, batches, rates or StepRates())
    search = _Search(judged, cost_model, batches, top, progress)
    interrupted = False
    try:
        with Inline(cost_model, batches) if workers == 1 else Workers(cost_model, batches, workers) as runner:
            search.run(runner)
    except KeyboardInterrupt:
        interrupted = True
    judged.sort(key=_rank)
    tokens = [batch.tokens for batch in batches]
    return Tuning(
        layouts=tuple(_tuned(each, tokens) for each in judged),
        settings=tuple(each.settings for each in judged),
        plans=search.plans,
        seconds=time.monotonic() - start,
        interrupted=interrupted,
    )


class _Search:
    """The search, and what it has come to."""

    def __init__(
        self,
        judged: Sequence[_Judged],
        cost_model: CostModel,
        batches: Sequence[GlobalBatch],
        top: int,
        progress: Progress | None,
    ) -> None:
        self.plans = 0
        self._judged, self._cost_model, self._batches = judged, cost_model, batches
        self._top, self._progress = top, progress
        self._open = [(each.bound_ns, at) for at, each in enumerate(judged) if each.error is None]
        heapq.heapify(self._open)
        self._known: list[int] = []

    def run(self, runner: Runner) -> None:
        """Until the best are known."""
        while self._open or runner.running:
            while self._open and runner.free:
                bound, at = heapq.heappop(self._open)
                if len(self._known) >= self._top and bound >= self._known[self._top - 1]:
                    self._open.clear()  # All others' bounds are higher.
                    break
                self._start(runner, at)
            if runner.running:
                self._take(*runner.next())

    def _start(self, runner: Runner, at: int) -> None:
        one = self._judged[at]
        if one.unsplit:
            try:
                split = choose_layer_split(one.settings, self._cost_model, self._batches)
            except DynaPipeError as error:
                one.error = error.message
                return
            one.settings, one.unsplit = msgspec.structs.replace(one.settings, layers_per_stage=split), False
        runner.start(at, one.settings, len(one.outcomes))

    def _take(self, at: int, batch: int, outcome: Outcome) -> None:
        one = self._judged[at]
        self.plans += 1
        if outcome.error is not None:
            one.error = outcome.error if len(self._batches) == 1 else f"batch {batch}: {outcome.error}"
        else:
            one.outcomes.append(outcome)
            if one.status is Status.PLANNED:
                self._known = sorted([*self._known, one.bound_ns])
            else:
                heapq.heappush(self._open, (one.bound_ns, at))
        if self._progress is not None:
            best = self._known[0] / len(self._batches) / NS_PER_MS if self._known else None
            left = sum(len(self._batches) - len(self._judged[other].outcomes) for _, other in self._open)
            self._progress(self.plans, self.plans + left, best)


def _judged(
    found: Sequence[Candidate], cost_model: CostModel, batches: Sequence[GlobalBatch], rates: StepRates
) -> list[_Judged]:
    """Candidates with their bounds, without those that come to the same layers as one before."""
    works: dict[int, list[Work]] = {}
    judged: list[_Judged] = []
    seen: set[PlannerSettings | Candidate] = set()
    for candidate in found:
        if candidate.error is not None:
            alike = msgspec.structs.replace(candidate, split=Split.EQUAL)
            if alike not in seen:
                judged.append(_Judged(candidate, None))
            seen.add(alike)
            continue
        tensor = candidate.tensor_parallel
        if tensor not in works:
            works[tensor] = [least_work(candidate.settings, cost_model, batch) for batch in batches]
        if candidate.split is Split.EVEN:
            split = even_work_split(candidate.settings, works[tensor])
            settings = msgspec.structs.replace(candidate.settings, layers_per_stage=split)
            candidate = msgspec.structs.replace(candidate, settings=settings)
        if candidate.split is not Split.AUTO and candidate.settings in seen:
            continue
        seen.add(candidate.settings)
        one = _Judged(candidate, works[tensor])
        state = cost_model.tables(tensor_parallel=tensor, recompute=candidate.settings.recompute[0]).state
        one.reduction_ns, one.optimizer_ns = step_ns(candidate.settings, state, rates)
        if not one.unsplit:
            try:
                Planner(candidate.settings, cost_model)
            except DynaPipeError as error:
                one.error = error.message
        judged.append(one)
    return judged


def _rank(one: _Judged) -> tuple[int, int]:
    place = {Status.PLANNED: 0, Status.PARTIAL: 1, Status.PRUNED: 1, Status.INFEASIBLE: 2}
    return place[one.status], one.bound_ns


def _tuned(one: _Judged, tokens: Sequence[int]) -> TunedLayout:
    candidate, settings, planned = one.candidate, one.settings, len(one.outcomes)
    allowed = settings.micro_batch_layouts
    found = TunedLayout(
        data_parallel=candidate.data_parallel,
        tensor_parallel=candidate.tensor_parallel,
        pipeline_parallel=candidate.pipeline_parallel,
        chunks=candidate.chunks,
        layers_per_stage=None if one.unsplit or candidate.error else settings.layout.layers_per_stage,
        layout="auto" if len(allowed) > 1 else allowed[0].value,
        distributed_optimizer=settings.distributed_optimizer,
        status=one.status,
        batches=planned,
        error=one.error,
    )
    if one.error is not None:
        return found
    ends = one.reduction_ns + one.optimizer_ns
    bounded = msgspec.structs.replace(
        found,
        reduction_ms=one.reduction_ns / NS_PER_MS,
        optimizer_ms=one.optimizer_ns / NS_PER_MS,
        bound_ms=one.bound_ns / len(one.bounds) / NS_PER_MS,
    )
    if not planned:
        return bounded
    total_ns = sum(outcome.predicted_ns for outcome in one.outcomes) + ends * planned
    peaks = (max(stage) / BYTES_PER_MB for stage in zip(*(each.peak_bytes for each in one.outcomes), strict=True))
    return msgspec.structs.replace(
        bounded,
        predicted_ms=total_ns / planned / NS_PER_MS,
        tokens_per_second=sum(tokens[:planned]) / total_ns * 1e9,
        peak_memory_mb=tuple(peaks),
    )
