"""The best layouts of a space, found best first.

Every candidate begins with a lower bound on the time of its batches' plans. The candidate with the least bound has its
next batch planned in full, which raises its bound to the predicted time. The search ends when the best `top` candidates
are planned on every batch and no other bound is below theirs: no candidate that was left out is among the best.

    bound ──► plan batch 0 ──► bound ──► plan batch 1 ──► … ──► known          least bound first

The layers of the few best are then split as training chooses it (`choosing.layer_split`), in half layers, too. Other
ways to make micro-batches have searches of their own over the same layouts, each for its best.
"""

import copy
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from megatron_dynapipe.choosing.layer_split import choose_layer_split
from megatron_dynapipe.core.errors import ConfigError, DynaPipeError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import NS_PER_MS
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning.evaluate import Outcome, StepRates, Workers
from megatron_dynapipe.tools.tuning.evaluation import Evaluation, evaluations_of, rank, tuned, tuning_of
from megatron_dynapipe.tools.tuning.space import Space, SplitMethod, Status, TunedLayout, Tuning, candidates

Progress = Callable[[int, int, float | None], None]
"""Called with plans made, plans that may be needed at most, and the best predicted time (ms) so far."""

NEAR, IMPROVED = 0.08, 4
"""So many layouts with stages, within this share of the best, have their layers split as training would."""


def tune(
    base: PlannerSettings,
    cost_model: CostModel,
    batches: Sequence[GlobalBatch],
    space: Space,
    *,
    rates: StepRates | None = None,
    top: int = 3,
    rivals: Mapping[str, PlannerSettings] | None = None,
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
        rivals: settings of other ways to make micro-batches, on one device, by name: each way's best layout is found.
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
    rates = rates or StepRates()
    evaluations = evaluations_of(candidates(base, space, cost_model), cost_model, batches, rates)
    search = _Search(evaluations, cost_model, batches, top, progress)
    of_rivals: dict[str, TunedLayout] = {}
    with_stages: dict[str, TunedLayout] = {}
    interrupted = False
    try:
        with Workers(cost_model, batches, workers) as evaluating:
            search.run(evaluating)
            if SplitMethod.EVEN in space.splits:
                _improve_splits(evaluations, space, evaluating)
            if rivals:
                others = _Rivals(rivals, space, cost_model, batches, rates)
                of_rivals = others.best(evaluating)
                if staged := _with_stages(evaluations):
                    sizes = ("data_parallel", "tensor_parallel", "pipeline_parallel")
                    with_stages = others.best(evaluating, on={name: staged.candidate.sizes[name] for name in sizes})
    except KeyboardInterrupt:
        interrupted = True
    evaluations.sort(key=rank)
    tuning = tuning_of(evaluations, batches, search.plans, time.monotonic() - start, interrupted=interrupted)
    return msgspec.structs.replace(tuning, rivals=of_rivals, rivals_with_stages=with_stages)


def _improve_splits(evaluations: Sequence[Evaluation], space: Space, workers: Workers) -> None:
    """Split the layers of the few best layouts as training would, where that is faster."""
    known = sorted((one for one in evaluations if one.status is Status.PLANNED), key=rank)
    staged: dict[tuple[int, ...], Evaluation] = {}
    for one in known:  # of the same sizes the fastest
        if one.candidate.pipeline_parallel > 1 and one.bound_ns <= known[0].bound_ns * (1 + NEAR):
            sizes = one.candidate.sizes | {"chunks": 1}
            staged.setdefault((*sizes.values(),), one)
    chosen = [*staged.values()][:IMPROVED]
    found = workers.improved([one.settings for one in chosen], space.chunks, halves=space.halves)
    for one, (split, outcomes) in zip(chosen, found, strict=True):
        improved = copy.copy(one)
        improved.outcomes = outcomes
        if all(outcome.error is None for outcome in outcomes) and improved.planned_ns < one.planned_ns:
            one.settings = one.settings.with_layers_per_stage(split)
            one.candidate = msgspec.structs.replace(one.candidate, chunks=one.settings.chunks)
            one.outcomes = outcomes


class _Rivals:
    """Searches of other ways to make micro-batches, in whole layers, each for its best layout.

    Their micro-batches run all positions.
    """

    def __init__(
        self,
        rivals: Mapping[str, PlannerSettings],
        space: Space,
        cost_model: CostModel,
        batches: Sequence[GlobalBatch],
        rates: StepRates,
    ) -> None:
        self._batches = [replace(batch, labels=None) for batch in batches]
        self._cost_model = cost_model
        by_hand = msgspec.structs.replace(space, splits=(SplitMethod.EQUAL, SplitMethod.EVEN), halves=False)
        every = candidates(next(iter(rivals.values())), by_hand, cost_model)
        evaluations = evaluations_of(every, cost_model, self._batches, rates)
        self._of = {name: [one.under(theirs) for one in evaluations] for name, theirs in rivals.items()}

    def best(self, workers: Workers, *, on: Mapping[str, object] | None = None) -> dict[str, TunedLayout]:
        """Each way's best layout, of all or of some sizes; layouts without a plan are left out."""
        found = {}
        for name, every in self._of.items():
            own = [one for one in every if on is None or one.candidate.sizes.items() >= on.items()]
            _Search(own, self._cost_model, self._batches, 1, None).run(workers)
            best = min(own, key=rank, default=None)
            if best is not None and best.status is Status.PLANNED:
                found[name] = tuned(best, [batch.tokens for batch in self._batches])
        return found


def _with_stages(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The best layout with stages, where the best of all has none."""
    planned = sorted((one for one in evaluations if one.status is Status.PLANNED), key=rank)
    if not planned or planned[0].candidate.pipeline_parallel > 1:
        return None
    return next((one for one in planned if one.candidate.pipeline_parallel > 1), None)


class _Search:
    """The search and its state."""

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
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
        left = (Status.PRUNED, Status.PARTIAL)
        self._open = [(one.bound_ns, at) for at, one in enumerate(evaluations) if one.status in left]
        heapq.heapify(self._open)
        self._known = sorted(one.bound_ns for one in evaluations if one.status is Status.PLANNED)

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
