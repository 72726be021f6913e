"""What is known of a candidate so far: bounds, plans, and what comes after them; and how it is told."""

import copy
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Self

import msgspec

from megatron_dynapipe.choosing.planners import planner_of, tables_of
from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, Recompute
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning.bounds import LeastWork, even_work_layer_split, least_ns, least_work
from megatron_dynapipe.tools.tuning.evaluate import Outcome, Reduction, StepRates, step_ns, token_flops
from megatron_dynapipe.tools.tuning.space import Candidate, SplitMethod, Status, TunedLayout, Tuning


class Evaluation:
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

    def under(self, rival: PlannerSettings) -> Self:
        """The same candidate with the micro-batches of another way, and none of its plans."""
        other = copy.copy(self)
        other.settings = msgspec.structs.replace(self.settings, partition=rival.partition)
        other.outcomes = []
        return other

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
        """How far it was evaluated."""
        if self.error is not None:
            return Status.INFEASIBLE
        if not self.outcomes:
            return Status.PRUNED
        return Status.PLANNED if len(self.outcomes) == len(self.bounds) else Status.PARTIAL


def evaluations_of(
    candidates: Sequence[Candidate], cost_model: CostModel, batches: Sequence[GlobalBatch], rates: StepRates
) -> list[Evaluation]:
    """Candidates with their bounds, without any whose layers are split as an earlier one's."""
    works: dict[tuple[int, int], list[LeastWork]] = {}
    evaluations: list[Evaluation] = []
    seen: set[PlannerSettings | Candidate] = set()
    for candidate in candidates:
        if candidate.error is not None:
            alike = msgspec.structs.replace(candidate, split=SplitMethod.EQUAL)
            if alike not in seen:
                evaluations.append(Evaluation(candidate, []))
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
        one = Evaluation(candidate, bounds)
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


def tuning_of(
    evaluations: list[Evaluation],
    batches: Sequence[GlobalBatch],
    plans: int,
    seconds: float,
    *,
    interrupted: bool = False,
) -> Tuning:
    """Evaluations, the best first, as a result."""
    tokens = [batch.tokens for batch in batches]
    return Tuning(
        layouts=tuple(tuned(evaluation, tokens) for evaluation in evaluations),
        settings=tuple(evaluation.settings for evaluation in evaluations),
        plans=plans,
        seconds=seconds,
        interrupted=interrupted,
    )


def rank(one: Evaluation) -> tuple[int, int]:
    """The key that sorts evaluations, the best first."""
    place = {Status.PLANNED: 0, Status.PARTIAL: 1, Status.PRUNED: 1, Status.INFEASIBLE: 2}
    return place[one.status], one.bound_ns


def tuned(one: Evaluation, tokens: Sequence[int]) -> TunedLayout:
    """An evaluation's layout and its predictions, for batches of so many real tokens."""
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
