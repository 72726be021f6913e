"""How many layers each stage holds, chosen once per run so that stages are even.

The last stage also has the head and the loss, and a T5's encoder and decoder layers cost very different amounts, so
an equal number of layers is not an equal amount of work. The split is evened on the micro-batches of planned batches,
then improved layer by layer on the batches' predicted times: memory, recomputation and bubbles count as they do in
training. A layer may be divided between its attention and its MLP where the costs of both are known.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, permutations

import msgspec
import numpy as np

from megatron_dynapipe.cost import (
    ABSENT,
    CostModel,
    CostTables,
    Kind,
    PipelineLayout,
    Quantity,
    Split,
    in_halves,
    of_halves,
    packed_costs,
)
from megatron_dynapipe.errors import DataError, InfeasibleError, PlanningError
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.problem import BoolArray, IntArray
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout, Recompute, input_positions, target_positions

_logger = logging.getLogger(__name__)

BATCHES = 3
"""Batches planned for every split that is tried."""

EVALUATIONS = 100
"""Schedules tried for each of them. With packed rows as many as a plan tries: most of the time goes into the rows that
a search begins with, and a short one says little."""

TRIALS = 40
"""Splits tried at most, of whole layers and of halves."""

TOLERANCE = 1.03
"""Splits whose estimate is worse than the best one's by more than this are not tried."""

_Work = IntArray
"""Modules' costs of micro-batches: int64 `[micro-batches, kinds, len(Quantity)]`. They do not depend on the split."""

UNPLANNED = 2**62
"""Predicted time of a split under which a batch cannot be planned."""


def choose_layer_split(
    settings: PlannerSettings,
    cost_model: CostModel,
    batches: Sequence[GlobalBatch],
    *,
    to_fit: Sequence[GlobalBatch] = (),
    halves: bool = True,
) -> Split:
    """The layers per stage under which the batches are predicted to run fastest.

    A sample that fits alone under the split where the search begins fits alone under the one that is chosen. Samples
    that do not are left out, with a notice.

    Args:
        settings: the run's; its own layer split is where the search begins.
        cost_model: what layers cost.
        batches: global batches of the lengths to come; the first few that can be planned are used.
        to_fit: more lengths that may come; they have no weight, but must go on fitting.
        halves: whether a layer may be divided between its attention and its MLP, where their costs are known.

    Raises:
        PlanningError: none of the batches can be planned under the splits that were tried.
    """
    trials = _Trials(settings, cost_model, batches, to_fit)
    best = settings.layout.layers_per_stage
    trials.require(best)
    evened = trials.evened(best, trials.halves_of_layer)
    if not trials.required:  # Model state alone is too much where the search begins.
        trials.require(evened)
    starts = [best, evened, *_padded_choice(settings, cost_model, batches, to_fit)]
    trials.choose_batches(starts)
    layer = trials.halves_of_layer
    best = trials.improved(min(starts, key=trials.predicted_ns), (layer,))
    if halves and trials.know_halves:  # From the best of whole layers, so that halves are never behind it.
        module = layer // 2
        best = trials.improved(min(best, trials.evened(best, module), key=trials.predicted_ns), (module, layer))
    return best


def _padded_choice(
    settings: PlannerSettings,
    cost_model: CostModel,
    batches: Sequence[GlobalBatch],
    to_fit: Sequence[GlobalBatch],
) -> list[Split]:
    """Whole layers for padded micro-batches alone, if they are not all that is allowed: a good start for others."""
    if BatchLayout.PADDED not in settings.micro_batch_layouts or len(settings.micro_batch_layouts) == 1:
        return []
    padded = msgspec.structs.replace(settings, micro_batch_layouts=(BatchLayout.PADDED,), slices="off")
    try:
        return [choose_layer_split(padded, cost_model, batches, to_fit=to_fit, halves=False)]
    except PlanningError:
        return []


def _neighbours(split: Split, step: int) -> list[Split]:
    """Splits with so many halves moved from one stage to another."""
    moved, halves = [], in_halves(split)
    for source, destination in permutations(range(len(split)), 2):
        if halves[source] > step:
            counts = list(halves)
            counts[source] -= step
            counts[destination] += step
            moved.append(of_halves(counts))
    return moved


class _Trials:
    """Splits that were tried, and the micro-batches by which others are estimated."""

    def __init__(
        self,
        settings: PlannerSettings,
        cost_model: CostModel,
        batches: Sequence[GlobalBatch],
        to_fit: Sequence[GlobalBatch],
    ) -> None:
        self.results: dict[Split, tuple[int, list[MicroBatch]]] = {}
        # Two modules of a pattern, in which a split counts modules, are one layer of attention and MLP.
        self.halves_of_layer = 4 if settings.pattern else 2
        self._settings, self._cost_model, self._batches = settings, cost_model, list(batches)
        self._lengths = _different([*batches, *to_fit])
        self._required = np.zeros(len(self._lengths), np.bool_)
        self._counting = _share_that_counts(batches)
        self._work = self._alone()

    @property
    def know_halves(self) -> bool:
        """Whether costs of halves of layers are known."""
        return all(self._tables(mode).division for mode in self._settings.recompute)

    @property
    def required(self) -> bool:
        """Whether there are samples that must fit."""
        return bool(self._required.any())

    def require(self, split: Split) -> None:
        """From now on, every sample that fits alone under this split must fit alone under others."""
        self._required = self._fitting(split)

    def fits(self, split: Split) -> bool:
        """Whether all samples that must fit do."""
        return bool(self._fitting(split)[self._required].all())

    def choose_batches(self, splits: Sequence[Split]) -> None:
        """Keep the first few batches that can be planned under one of the splits, without samples that cannot."""
        batches, left_out = self._feasible_batches()
        if left_out:
            _logger.warning(
                "notice: %d of %d samples are left out of the choice of a layer split: they fit no micro-batch",
                left_out,
                sum(map(len, self._batches)),
            )
        for split in splits:
            planner = self._planner(split)
            if planner is None:
                continue
            kept = list(islice((batch for batch in batches if _plan(planner, batch) is not None), BATCHES))
            if kept:
                self._batches = kept
                return
        raise PlanningError(
            f"none of {len(self._batches)} batches can be planned with layers per stage of "
            f"{' or '.join(map(str, splits))}",
            hint="use more pipeline stages or tensor parallelism, or truncate long samples",
        )

    def evened(self, split: Split, step: int) -> Split:
        """The split that the estimate finds best, so many halves moved at a time, samples that must fit fitting."""
        while True:
            here = self.estimate_ns(split)
            better = sorted(_neighbours(split, step), key=self.estimate_ns)
            found = next((each for each in better if self.estimate_ns(each) < here and self.fits(each)), None)
            if found is None:
                return split
            split = found

    def improved(self, best: Split, steps: Sequence[int]) -> Split:
        """The best split that moves of so many halves lead to, each of them predicted faster than the one before."""
        last = len(self.results) + TRIALS
        improved = True
        while improved:
            rows = [self._module_costs(micro_batch) for micro_batch in self.results[best][1]]
            self._work = np.array(rows, np.int64).reshape(-1, *self._work.shape[1:])
            improved = False
            worst = self.estimate_ns(best) * TOLERANCE
            for split in sorted((each for step in steps for each in _neighbours(best, step)), key=self.estimate_ns):
                if len(self.results) >= last or self.estimate_ns(split) > worst:
                    break
                if self.fits(split) and self.predicted_ns(split) < self.predicted_ns(best):
                    best, improved = split, True
                    break
        return best

    def predicted_ns(self, split: Split) -> int:
        """Predicted time of the batches under the split, all together; `UNPLANNED` where one has no plan."""
        if split not in self.results:
            planner = self._planner(split)
            plans = [] if planner is None else [_plan(planner, batch) for batch in self._batches]
            self.results[split] = self._summary(plans)
        return self.results[split][0]

    def estimate_ns(self, split: Split) -> int:
        """Work of the busiest stage over the known micro-batches, and the longest warm-up and drain around it."""
        s = self._settings
        layout = replace(s.layout, layers_per_stage=split)
        times = stage_times(self._work, self._tables(s.recompute[0]).kinds, layout, self._counting)
        times = times.reshape(-1, s.chunks, layout.stages).sum(axis=1)
        warmup = (times.sum(axis=1) - times.max(axis=1)).max(initial=0)
        return int(times.sum(axis=0).max() // s.data_parallel + warmup)

    def _alone(self) -> _Work:
        """Every sample as a micro-batch of its own, where there are no plans."""
        batches = [Samples.of(batch, self._settings.family) for batch in self._batches[:BATCHES]]
        inputs, targets = (np.concatenate([getattr(b, name) for b in batches]) for name in ("inputs", "targets"))
        tables = self._tables(self._settings.recompute[0])
        costs = tables.at_sizes(tables.at_lengths(inputs, targets), np.ones_like(inputs))
        return np.asarray(costs[(costs != ABSENT).all(axis=(1, 2))])

    def _tables(self, mode: Recompute) -> CostTables:
        return self._settings.tables(self._cost_model, mode)

    def _module_costs(self, micro_batch: MicroBatch) -> IntArray:
        """Modules' costs of a planned micro-batch: int64[kinds, len(Quantity)]."""
        tables, family = self._tables(micro_batch.recompute), self._settings.family
        if micro_batch.layout is BatchLayout.PACKED:
            inputs = np.array([input_positions(family, n) for n in micro_batch.input_lengths], np.int64)
            targets = np.array([target_positions(family, n) for n in micro_batch.target_lengths], np.int64)
            row = packed_costs(tables, inputs, targets)
            assert row is not None
            return row
        size, inputs, targets = (np.array([number], np.int64) for number in micro_batch.shape)
        costs: IntArray = tables.at_sizes(tables.at_lengths(inputs, targets), size)[0]
        return costs

    def _summary(self, plans: Sequence[IterationPlan | None]) -> tuple[int, list[MicroBatch]]:
        """Predicted time of all plans, and their micro-batches."""
        planned = [plan for plan in plans if plan is not None]
        if not planned or len(planned) < len(plans):
            return UNPLANNED, []
        batches = [mb for plan in planned for replica in plan.replicas for mb in replica.micro_batches]
        return sum(plan.totals.predicted_ns for plan in planned), [mb for mb in batches if not mb.is_filler]

    def _fitting(self, split: Split) -> BoolArray:
        """Which of the different samples fit alone."""
        planner = self._planner(split)
        if planner is None:
            return np.zeros(len(self._lengths), np.bool_)
        return planner.fits_alone(Samples.of(self._lengths, self._settings.family))

    def _feasible_batches(self) -> tuple[list[GlobalBatch], int]:
        """The batches without samples that need not fit, and how many those were."""
        lengths = zip(self._lengths.input_lengths.tolist(), self._lengths.target_lengths.tolist(), strict=True)
        fitting = dict(zip(lengths, self._required.tolist(), strict=True))
        batches, left_out = [], 0
        for batch in self._batches:
            pairs = zip(batch.input_lengths.tolist(), batch.target_lengths.tolist(), strict=True)
            rows = np.array([fitting[pair] for pair in pairs], np.bool_)
            left_out += int((~rows).sum())
            batches.append(
                replace(
                    batch,
                    sample_ids=batch.sample_ids[rows],
                    input_lengths=batch.input_lengths[rows],
                    target_lengths=batch.target_lengths[rows],
                    labels=None if batch.labels is None else batch.labels[rows],
                )
            )
        return batches, left_out

    def _planner(self, split: Split) -> Planner | None:
        """A planner for the split, or None where its model state alone does not fit."""
        packs = BatchLayout.PACKED in self._settings.micro_batch_layouts
        settings = msgspec.structs.replace(
            self._settings,
            layers_per_stage=split,
            schedule=self._settings.schedule
            if packs
            else replace(self._settings.schedule, search_evaluations=EVALUATIONS),
        )
        try:
            return Planner(settings, self._cost_model)
        except InfeasibleError:
            return None


def stage_times(work: IntArray, kinds: Sequence[Kind], layout: PipelineLayout, counting: float = 1.0) -> IntArray:
    """Forward and backward together on every virtual stage: int64 `[micro-batches, virtual stages]`.

    Args:
        work: modules' costs of every micro-batch, `[micro-batches, kinds, len(Quantity)]`.
        kinds: of the modules.
        layout: modules of every virtual stage.
        counting: share of positions that count, over which alone the last MLP and the head run.
    """
    times = work[:, :, Quantity.FORWARD] + work[:, :, Quantity.BACKWARD]
    by_stage = times @ layout.counts(kinds).T
    last = len(layout.modules) - 1
    for module in (last - 1, last) if counting < 1 else ():
        left_out = np.rint(times[:, kinds.index(layout.modules[module])] * (1 - counting)).astype(np.int64)
        by_stage[:, np.searchsorted(layout.cuts, module, side="right")] -= left_out
    return np.asarray(by_stage)


def _share_that_counts(batches: Sequence[GlobalBatch]) -> float:
    """Of the positions of batches of decoder-only samples."""
    labels = [batch.input_lengths if batch.labels is None else batch.labels for batch in batches]
    return sum(int(some.sum()) for some in labels) / max(sum(int(batch.input_lengths.sum()) for batch in batches), 1)


def _different(batches: Sequence[GlobalBatch]) -> GlobalBatch:
    """One sample of each pair of lengths."""
    inputs = np.concatenate([batch.input_lengths for batch in batches])
    targets = np.concatenate([batch.target_lengths for batch in batches])
    pairs = np.unique(np.stack([inputs, targets]), axis=1)
    ids = np.arange(pairs.shape[1], dtype=np.int64)
    return GlobalBatch(iteration=0, sample_ids=ids, input_lengths=pairs[0], target_lengths=pairs[1])


def _plan(planner: Planner, batch: GlobalBatch) -> IterationPlan | None:
    try:
        return planner.plan(batch, 0)
    except (PlanningError, DataError):
        return None
