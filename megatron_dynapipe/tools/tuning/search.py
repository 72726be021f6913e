"""The best layouts of a space, found best first.

Every candidate begins with a lower bound on the time of its batches' plans. The candidate with the least bound has its
next batch planned in full, which raises its bound to the predicted time. The search ends when the best `top` candidates
are planned on every batch and no other bound is below theirs: no candidate that was left out is among the best.

    bound ──► plan batch 0 ──► bound ──► plan batch 1 ──► … ──► known          least bound first
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import msgspec

from megatron_dynapipe.choosing.layer_split import choose_layer_split
from megatron_dynapipe.choosing.limits import limits
from megatron_dynapipe.choosing.planners import planner_of, tables_of
from megatron_dynapipe.core.errors import ConfigError, DynaPipeError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, Recompute
from megatron_dynapipe.costing import CostModel, Network
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.segments import SegmentCosts, divide_segments, segment_settings
from megatron_dynapipe.tools.tuning.bounds import LeastWork, even_work_layer_split, least_ns, least_work
from megatron_dynapipe.tools.tuning.evaluate import (
    Evaluator,
    Outcome,
    Reduction,
    StepRates,
    Workers,
    step_ns,
    token_flops,
)
from megatron_dynapipe.tools.tuning.space import Candidate, Space, SplitMethod, Status, TunedLayout, Tuning, candidates

Progress = Callable[[int, int, float | None], None]
"""Called with plans made, plans that may be needed at most, and the best predicted time (ms) so far."""


class _Evaluation:
    """A candidate and what is known of it so far."""

    def __init__(self, candidate: Candidate, bounds: Sequence[int]) -> None:
        self.candidate = candidate
        self.settings = candidate.settings
        self.error = candidate.error
        self.outcomes: list[Outcome] = []
        self.bounds = bounds
        self.reduction: Reduction | None = None
        self.optimizer_ns = 0
        self.full_use: float | None = None
        """Tokens per second at the peak of all devices."""
        self.unsplit = candidate.split is SplitMethod.AUTO

    @property
    def bound_ns(self) -> int:
        """The time of all batches: what was planned, and bounds of the others."""
        left = self.bounds[len(self.outcomes) :]
        least = 0 if self.reduction is None else self.reduction.least_ns
        return self.planned_ns + sum(left) + (least + self.optimizer_ns) * len(left)

    @property
    def planned_ns(self) -> int:
        """The time of the batches that were planned."""
        passes = sum(outcome.predicted_ns for outcome in self.outcomes)
        return passes + self.exposed_ns + self.optimizer_ns * len(self.outcomes)

    @property
    def exposed_ns(self) -> int:
        """What passes do not hide of the reduction and gathering of the batches that were planned."""
        edges = [outcome.edges for outcome in self.outcomes if outcome.edges is not None]
        return 0 if self.reduction is None else sum(map(self.reduction.exposed_ns, edges))

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
    evaluations = _evaluations(candidates(base, space, cost_model), cost_model, batches, rates or StepRates())
    search = _Search(evaluations, cost_model, batches, top, progress)
    interrupted = False
    try:
        with Workers(cost_model, batches, workers) as evaluating:
            search.run(evaluating)
    except KeyboardInterrupt:
        interrupted = True
    evaluations.sort(key=_rank)
    tuning = _tuning(evaluations, batches, search.plans, time.monotonic() - start, interrupted=interrupted)
    best, *others = tuning.layouts
    if best.predicted_ms is None:
        return tuning
    planner = planner_of(tuning.settings[0], cost_model)
    plan = planner.plan(batches[0], 0)
    causes = limits(planner, batches[0], plan).causes(plan.totals.predicted_ns)
    return msgspec.structs.replace(tuning, layouts=(msgspec.structs.replace(best, of_limits=causes), *others))


def tune_segments(
    costs: SegmentCosts,
    batches: Sequence[GlobalBatch],
    *,
    devices: int,
    memory_limit_bytes: int,
    network: Network | None = None,
    schedule: ScheduleSettings | None = None,
) -> Tuning:
    """All divisions of the devices into replicas and stages of a user's own model, the fastest first.

    Every number of stages has its own division of the segments, with costs of its own. There are few, so all are
    planned on every batch. `layers_per_stage` of a layout counts segments; `split_model(…, stages=pipeline_parallel,
    costs=costs)` and `Pipeline(replicas=data_parallel)` train it.

    Args:
        costs: measured by `profile_module`.
        batches: a sample of the global batches to come.
        devices: of the cluster; every layout uses all of them.
        memory_limit_bytes: of a device.
        network: links; by default those that the costs were measured with.
        schedule: how passes are ordered.

    Raises:
        ConfigError: no batches, or no devices.
    """
    if not batches or devices < 1:
        raise ConfigError(f"expected at least one batch and one device, got {len(batches)} and {devices}")
    start = time.monotonic()
    settings_of = partial(
        segment_settings, costs, memory_limit_bytes=memory_limit_bytes, network=network, schedule=schedule
    )
    evaluated = [
        _evaluated(settings_of, costs, stages, devices // stages, batches)
        for stages in range(1, devices + 1)
        if devices % stages == 0
    ]
    evaluated.sort(key=lambda pair: _rank(pair[0]))
    evaluations = [one for one, _ in evaluated]
    tuning = _tuning(evaluations, batches, sum(len(one.outcomes) for one in evaluations), time.monotonic() - start)
    layouts = [
        msgspec.structs.replace(layout, layers_per_stage=segments)
        for layout, (_, segments) in zip(tuning.layouts, evaluated, strict=True)
    ]
    return msgspec.structs.replace(tuning, layouts=tuple(layouts))


def _evaluated(
    settings_of: Callable[..., PlannerSettings],
    costs: SegmentCosts,
    stages: int,
    replicas: int,
    batches: Sequence[GlobalBatch],
) -> tuple[_Evaluation, tuple[int | float, ...] | None]:
    """Segments divided into stages and planned on all batches, and the number of segments on each stage."""
    whole = settings_of([0] * len(costs.segments), stages=1, replicas=1)
    candidate = Candidate(settings=whole, data_parallel=replicas, tensor_parallel=1, pipeline_parallel=stages)
    one = _Evaluation(candidate, [0] * len(batches))
    counts = None
    try:
        stage_of = divide_segments(costs, costs.points, stages, whole.memory_limit_bytes)
        counts = tuple(stage_of.count(stage) for stage in range(stages))
        one.settings = settings_of(stage_of, stages=stages, replicas=replicas)
        cost_model = costs.of_stages(stage_of)
        state = cost_model.tables(tensor_parallel=1, recompute=Recompute.NONE).state
        one.reduction = Reduction.of(one.settings, state, StepRates())
        _, one.optimizer_ns = step_ns(one.settings, state, StepRates())
    except DynaPipeError as error:
        one.error = error.message
        return one, counts
    evaluate = Evaluator(cost_model, batches)
    one.outcomes = [evaluate(one.settings, number) for number in range(len(batches))]
    one.error = next((outcome.error for outcome in one.outcomes if outcome.error is not None), None)
    return one, counts


class _Search:
    """The search and its state."""

    def __init__(
        self,
        evaluations: Sequence[_Evaluation],
        cost_model: CostModel,
        batches: Sequence[GlobalBatch],
        top: int,
        progress: Progress | None,
    ) -> None:
        self.plans = 0
        self._evaluations = evaluations
        self._cost_model = cost_model
        self._batches = batches
        self._top = top
        self._progress = progress
        self._open = [(one.bound_ns, at) for at, one in enumerate(evaluations) if one.error is None]
        heapq.heapify(self._open)
        self._known: list[int] = []

    def run(self, workers: Workers) -> None:
        """Until the best are known."""
        while self._open or workers.running:
            while self._open and workers.free:
                bound, at = heapq.heappop(self._open)
                if len(self._known) >= self._top and bound >= self._known[self._top - 1]:
                    self._open.clear()  # All others' bounds are higher.
                    break
                self._start(workers, at)
            if workers.running:
                self._take(*workers.next())

    def _start(self, workers: Workers, at: int) -> None:
        one = self._evaluations[at]
        if one.unsplit:
            try:
                halves = one.candidate.halves
                split = choose_layer_split(one.settings, self._cost_model, self._batches, halves=halves)
            except DynaPipeError as error:
                one.error = error.message
                return
            one.settings = one.settings.with_layers_per_stage(split)
            one.unsplit = False
        workers.start(at, one.settings, len(one.outcomes))

    def _take(self, at: int, batch: int, outcome: Outcome) -> None:
        one = self._evaluations[at]
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
            left = sum(len(self._batches) - len(self._evaluations[other].outcomes) for _, other in self._open)
            self._progress(self.plans, self.plans + left, best)


def _evaluations(
    candidates: Sequence[Candidate], cost_model: CostModel, batches: Sequence[GlobalBatch], rates: StepRates
) -> list[_Evaluation]:
    """Candidates with their bounds, without those whose layers are split as those of one before."""
    works: dict[tuple[int, int], list[LeastWork]] = {}
    evaluations: list[_Evaluation] = []
    seen: set[PlannerSettings | Candidate] = set()
    for candidate in candidates:
        if candidate.error is not None:
            alike = msgspec.structs.replace(candidate, split=SplitMethod.EQUAL)
            if alike not in seen:
                evaluations.append(_Evaluation(candidate, []))
            seen.add(alike)
            continue
        shared = candidate.tensor_parallel, candidate.expert_parallel
        if shared not in works:
            works[shared] = [least_work(candidate.settings, cost_model, batch) for batch in batches]
        if candidate.split is SplitMethod.EVEN:
            split = even_work_layer_split(candidate.settings, works[shared])
            settings = candidate.settings.with_layers_per_stage(split)
            candidate = msgspec.structs.replace(candidate, settings=settings)
        if candidate.split is not SplitMethod.AUTO and candidate.settings in seen:
            continue
        seen.add(candidate.settings)
        any_split = candidate.split is SplitMethod.AUTO
        bounds = [least_ns(candidate.settings, work, any_split=any_split) for work in works[shared]]
        one = _Evaluation(candidate, bounds)
        state = tables_of(candidate.settings, cost_model)[0].state
        one.reduction = Reduction.of(candidate.settings, state, rates)
        _, one.optimizer_ns = step_ns(candidate.settings, state, rates)
        if rates.peak_flops is not None and state.expert_kind is None:
            devices = math.prod((candidate.data_parallel, candidate.tensor_parallel, candidate.pipeline_parallel))
            counted = fmean(work.counted for work in works[shared])
            one.full_use = devices * rates.peak_flops / token_flops(candidate.settings, state, counted)
        if not one.unsplit:
            try:
                planner_of(candidate.settings, cost_model)
            except DynaPipeError as error:
                one.error = error.message
        evaluations.append(one)
    return evaluations


def _tuning(
    evaluations: list[_Evaluation],
    batches: Sequence[GlobalBatch],
    plans: int,
    seconds: float,
    *,
    interrupted: bool = False,
) -> Tuning:
    """Evaluations, the best first, as a result."""
    tokens = [batch.tokens for batch in batches]
    return Tuning(
        layouts=tuple(_tuned(evaluation, tokens) for evaluation in evaluations),
        settings=tuple(evaluation.settings for evaluation in evaluations),
        plans=plans,
        seconds=seconds,
        interrupted=interrupted,
    )


def _rank(one: _Evaluation) -> tuple[int, int]:
    place = {Status.PLANNED: 0, Status.PARTIAL: 1, Status.PRUNED: 1, Status.INFEASIBLE: 2}
    return place[one.status], one.bound_ns


def _tuned(one: _Evaluation, tokens: Sequence[int]) -> TunedLayout:
    settings = one.settings
    planned = len(one.outcomes)
    allowed = settings.micro_batch_layouts
    known = dict[str, Any]()
    if one.error is None and one.reduction is not None:
        whole = one.reduction.reduction_ns + one.reduction.gathering_ns
        exposed = one.exposed_ns / planned if planned else one.reduction.least_ns
        known["reduction_ms"] = exposed / NS_PER_MS
        known["hidden_ms"] = (whole - exposed) / NS_PER_MS
        known["optimizer_ms"] = one.optimizer_ns / NS_PER_MS
        known["bound_ms"] = one.bound_ns / len(one.bounds) / NS_PER_MS
    if one.error is None and planned:
        total_ns = one.planned_ns
        peaks = zip(*(outcome.peak_bytes for outcome in one.outcomes), strict=True)
        known["predicted_ms"] = total_ns / planned / NS_PER_MS
        known["tokens_per_second"] = sum(tokens[:planned]) / total_ns * 1e9
        known["peak_memory_mb"] = tuple(max(stage) / BYTES_PER_MB for stage in peaks)
        known["idle"] = fmean(outcome.idle for outcome in one.outcomes)
        known["micro_batches"] = fmean(outcome.micro_batches for outcome in one.outcomes)
        modes = {mode for outcome in one.outcomes for mode in outcome.recompute.split("+")}
        known["recompute"] = "+".join(mode for mode in Recompute if mode in modes)
        known["mfu"] = None if one.full_use is None else known["tokens_per_second"] / one.full_use
    return TunedLayout(
        **one.candidate.sizes,
        layers_per_stage=None if one.unsplit or one.candidate.error else settings.layout.layers_per_stage,
        layout="auto" if len(allowed) > 1 else allowed[0].value,
        distributed_optimizer=settings.distributed_optimizer,
        status=one.status,
        batches=planned,
        error=one.error,
        **known,
    )
