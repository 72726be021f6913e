"""How many layers each virtual stage holds, and how many of them a rank has: chosen once per run.

The last stage also has the head and the loss, and a T5's encoder and decoder layers cost very different amounts, so
an equal number of layers is not an equal amount of work. Batches are planned, and their micro-batches scheduled under
neighbouring splits (`choosing.rescheduling`): modules move from stage to stage as long as that is faster. The split at
the end and its neighbours are planned by short searches, the fastest few of all in full: these plans decide. A layer
may be divided between its attention and its MLP where the costs of both are known.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice, pairwise

import msgspec
import numpy as np

from megatron_dynapipe.choosing.evenest import evenest, tilted
from megatron_dynapipe.choosing.planners import planner_over, tables_of
from megatron_dynapipe.choosing.precedents import precedent_of
from megatron_dynapipe.choosing.rescheduling import ModuleCosts, Rescheduler, neighbours_of, share_that_counts
from megatron_dynapipe.core.batch import GlobalBatch, Samples, fits_alone
from megatron_dynapipe.core.costs import ABSENT, Quantity
from megatron_dynapipe.core.errors import ConfigError, DataError, InfeasibleError, PlanningError
from megatron_dynapipe.core.model import LayerSplit, ModuleSplit
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import BoolArray
from megatron_dynapipe.core.settings import PlannerSettings, Precedent
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.costing.model import CostModel
from megatron_dynapipe.costing.splits import even_layer_split

_logger = logging.getLogger(__name__)

BATCHES = 3
"""Batches planned for every split that is tried, at most."""

SAMPLES = 1_000
"""Samples after which no further batch is planned: large batches differ less, and take longer."""

EVALUATIONS, OF_PADDED = 4000, 100
"""Schedules tried for each of them, and without packed rows; 3 in 10 where they follow plans of the split that is
improved."""

EASY = 1.1
"""Such plans may come so many times as far above their estimates: they only tell splits apart."""

FINALISTS = 3
"""The fastest splits by these, planned as the run is, and as many neighbours of the best while one is better."""

TRIALS = 16
"""Splits planned at most, each time that some are improved."""

BEHIND = 0.03
"""A number of chunks whose first splits are further behind the best is not improved."""

RESCHEDULED = 32
"""The most neighbours of a split that are scheduled: the ones with the least bounds."""

NEAREST = 6
"""Neighbours of the best split that are planned where a descent leads nowhere: the fastest scheduled ones."""

MORE_CHUNKS, BEGINS = (2, 4), 2
"""Virtual stages of a rank to choose among, in addition to one; splits to begin each with: the fastest scheduled."""

LEAST_GAIN = 0.01
"""More chunks send more messages, so they must be faster by this share."""

LAYER = 2
"""Modules that move together at first: an attention and its MLP, in models of single modules too."""

UNPLANNED = 2**62
"""Predicted time of a split under which a batch cannot be planned."""


def choose_layer_split(
    settings: PlannerSettings,
    cost_model: CostModel,
    batches: Sequence[GlobalBatch],
    *,
    to_fit: Sequence[GlobalBatch] = (),
    halves: bool = True,
    chunks: Sequence[int] = (),
    trials: int = TRIALS,
) -> LayerSplit:
    """The layers per virtual stage under which the batches are predicted to run fastest.

    A sample that fits alone under the split where the search begins fits alone under the one that is chosen. Samples
    that do not are left out, with a notice.

    Args:
        settings: the run's; its own layer split is where the search begins.
        cost_model: what layers cost.
        batches: global batches of the lengths to come; the first few that can be planned are used, of large ones fewer.
        to_fit: more lengths that may come; they have no weight, but must go on fitting.
        halves: whether a layer may be divided between its attention and its MLP, where their costs are known.
        chunks: more numbers of virtual stages per rank to choose among; the split's length says which was chosen.
        trials: splits planned at most, each time that some are improved: whole layers, halves, each number of chunks.

    Raises:
        PlanningError: none of the batches can be planned under the splits that were tried.
    """
    model = settings.model
    tried = _Trials(settings, cost_model, batches, to_fit, trials)
    start = settings.layout.modules_per_stage
    tried.require(start)
    evened = tried.by_work(len(start), (LAYER,))
    for split in () if tried.required else evened:  # Model state alone is too much where the search begins.
        tried.require(split)
    tried.choose_batches([start, *evened])
    steps = (1, LAYER) if halves and tried.know_modules else (LAYER,)
    begins = {len(start): [start, *evened]}
    for count in chunks if settings.pipeline_parallel > 1 else ():
        stages = settings.pipeline_parallel * count
        try:
            even = model.modules_of(even_layer_split(model.layers, stages, halves=1 in steps))
        except ConfigError:  # fewer modules than virtual stages
            continue
        first = [even, *tried.by_work(stages, steps), *tried.tilted(count, steps)]
        begins[stages] = sorted(first, key=tried.scheduled_ns)[:BEGINS]
    for stages in tried.promising(begins):
        more = tried.improved(begins[stages], (LAYER,) if stages == len(start) else steps)
        if stages == len(start):  # From the best of whole layers, so that halves are never behind it.
            tried.improved([more, *tried.by_work(stages, steps)], steps)
    return model.layers_of(tried.fastest(steps) or start)


class _Trials:
    """Splits that were planned, and the micro-batches by which others are estimated."""

    def __init__(
        self,
        settings: PlannerSettings,
        cost_model: CostModel,
        batches: Sequence[GlobalBatch],
        to_fit: Sequence[GlobalBatch],
        most: int,
    ) -> None:
        self.results: dict[ModuleSplit, tuple[int, list[IterationPlan]]] = {}
        self._settings = settings
        self._most = most
        own = settings.schedule.search_evaluations
        most_of_plan = EVALUATIONS if BatchLayout.PACKED in settings.micro_batch_layouts else OF_PADDED
        self._evaluations = most_of_plan if own is None else min(own, most_of_plan)
        self._precedents = dict[int, tuple[Precedent, ...]]()
        self._model = settings.model
        self._tables = tables_of(settings, cost_model)
        self._costs_digest = cost_model.digest
        self._batches = list(batches)
        self._whole = list[GlobalBatch]()  # with samples that were left out, which may fit in pieces
        pairs = [np.stack([batch.input_lengths, batch.target_lengths]) for batch in (*batches, *to_fit)]
        self._lengths = GlobalBatch.of_lengths(*np.unique(np.concatenate(pairs, axis=1), axis=1))  # one of each pair
        self._required = np.zeros(len(self._lengths), np.bool_)
        self._rescheduler = Rescheduler(settings, self._tables, share_that_counts(batches))
        self._known, self._plans = [[self._alone()]], list[IterationPlan]()
        self._scheduled: dict[ModuleSplit, int] = {}

    @property
    def know_modules(self) -> bool:
        """Whether costs of attention and of MLPs are known apart."""
        return all(tables.division for tables in self._tables)

    @property
    def required(self) -> bool:
        """Whether there are samples that must fit."""
        return bool(self._required.any())

    def require(self, split: ModuleSplit) -> None:
        """From now on, every sample that fits alone under this split must fit alone under others."""
        self._required = self._fitting(split)

    def fits(self, split: ModuleSplit) -> bool:
        """Whether all samples that must fit do."""
        return bool(self._fitting(split)[self._required].all())

    def choose_batches(self, splits: Sequence[ModuleSplit]) -> None:
        """Keep the first few batches that can be planned under one of the splits, without samples that cannot."""
        batches, left_out = self._feasible_batches()
        if left_out:
            _logger.warning(
                "notice: %d of %d samples are left out of the choice of a layer split: they fit no micro-batch",
                left_out,
                sum(map(len, self._batches)),
            )
        for split in splits:
            planner = self._planner(split, self._evaluations)
            if planner is None:
                continue
            both = zip(batches, self._batches, strict=True)
            planned = ((*each, plan) for each in both if (plan := _plan(planner, each[0])) is not None)
            kept = list(islice(planned, BATCHES))
            if kept:
                before = accumulate((len(batch) for batch, _, _ in kept), initial=0)
                few = [each for each, samples in zip(kept, before, strict=False) if samples < SAMPLES]
                self._batches, whole, plans = map(list, zip(*few, strict=True))
                self._whole = whole if left_out else []
                self.results[split] = sum(plan.totals.predicted_ns for plan in plans), plans
                self._learn(split)
                self._precedents.clear()  # splits that differ this much are searched
                return
        raise PlanningError(
            f"none of {len(self._batches)} batches can be planned with layers per stage of "
            f"{' or '.join(str(self._model.layers_of(split)) for split in splits)}",
            hint="use more pipeline stages or tensor parallelism, or truncate long samples",
        )

    def by_work(self, stages: int, steps: Iterable[int]) -> list[ModuleSplit]:
        """Splits over so many virtual stages, the busiest with the least work on the known micro-batches."""
        works = [(size, self._work(size)) for size in steps]
        return [self._in_modules(evenest(work, stages), size) for size, work in works if len(work) >= stages]

    def tilted(self, chunks: int, steps: Iterable[int]) -> list[ModuleSplit]:
        """Splits of even work on the ranks, the first ones with little in their first chunks."""
        size, stages = min(steps), self._settings.pipeline_parallel
        return [self._in_modules(split, size) for split in tilted(self._work(size), stages, chunks)]

    def _work(self, size: int) -> list[int]:
        """Of so many modules at a time, with the head behind the last, on the known micro-batches."""
        known = [its.values[:, :, [Quantity.FORWARD, Quantity.BACKWARD]] for its in chain.from_iterable(self._known)]
        *work, head = np.sum([values.sum(axis=(0, 2)) for values in known], axis=0).tolist()
        work[-1] += head
        return [sum(work[first : first + size]) for first in range(0, len(work), size)]

    def _in_modules(self, split: Sequence[int], size: int) -> ModuleSplit:
        """Modules of a split in parts of so many modules; the model's last part may have fewer."""
        ends = [min(end * size, len(self._model.modules) - 1) for end in accumulate(split)]
        return tuple(end - first for first, end in pairwise([0, *ends]))

    def promising(self, begins: Mapping[int, Sequence[ModuleSplit]]) -> list[int]:
        """Numbers of virtual stages whose first splits are planned to be at most `BEHIND` slower than the best."""
        if len(begins) == 1:
            return [*begins]
        least = {
            stages: min((self.predicted_ns(split) for split in splits if self.fits(split)), default=UNPLANNED)
            for stages, splits in begins.items()
        }
        return [stages for stages, ns in least.items() if ns <= min(least.values()) * (1 + BEHIND)]

    def improved(self, splits: Sequence[ModuleSplit], steps: Sequence[int]) -> ModuleSplit:
        """The best split that moves of so many modules lead to: where scheduling leads, and its nearest, planned short.

        The first of those given where what must fit fits none of them.
        """
        last = len(self.results) + self._most
        # Those that were not planned are scheduled with the micro-batches of another number of chunks.
        led_to = [self._descended(split, steps) for split in splits if split not in self.results]
        best = min(filter(self.fits, [*splits, *led_to]), key=self.predicted_ns, default=None)
        if best is None:
            return splits[0]
        while len(self.results) < last:
            self._learn(best)
            promising = [other for other in self._near(best, steps) if other not in self.results]
            here = self.predicted_ns(best)
            promising = [other for other in promising if self.fits(other)][: last - len(self.results)]
            better = next((other for other in promising if self.predicted_ns(other) < here), None)
            if better is None:
                break
            best = better
        return best

    def fastest(self, steps: Sequence[int]) -> ModuleSplit | None:
        """By plans in full: one that seems fastest, or that moves lead to from there; None if none can be planned."""
        best: ModuleSplit | None = None
        seem = sorted(filter(self.fits, self.results), key=self._weighed_ns)
        full = dict[ModuleSplit, float]()
        self._precedents.clear()
        if self._whole:  # plans in pieces follow none: neighbours would take a second each
            without, self._batches = self._batches, self._whole
            if able := list(islice(filter(self._plans_in_full, seem), FINALISTS)):
                return min(able, key=self._weighed_ns)
            self._batches = without
        while able := list(islice(filter(self._plans_in_full, seem), FINALISTS)):
            full |= {split: self._weighed_ns(split) for split in able}
            fastest = min(full, key=full.__getitem__)
            if fastest == best:
                break
            best = fastest
            self._learn(best)
            near = [split for split in dict.fromkeys(self._near(best, steps)) if split not in full and self.fits(split)]
            for split in near:
                self.results.pop(split, None)
            seem = sorted(near, key=self.predicted_ns)[:FINALISTS]
        return best

    def _plans_in_full(self, split: ModuleSplit) -> bool:
        """Plan a split as the run will be; whether it has plans."""
        self.results[split] = self._planned(split, self._settings.schedule.search_evaluations)
        if len(split) not in self._precedents:  # searched, and others follow
            self._learn(split)
        return bool(self.results[split][1])

    def _weighed_ns(self, split: ModuleSplit) -> float:
        """Predicted time, longer by what more chunks must be faster."""
        more = (len(split) // self._settings.pipeline_parallel).bit_length() - 1
        return self.predicted_ns(split) * (1 + LEAST_GAIN) ** more

    def _nearest(self, split: ModuleSplit, steps: Iterable[int]) -> list[ModuleSplit]:
        neighbours = neighbours_of(split, steps)
        if not neighbours:
            return []
        of_batches = [[self._rescheduler.bounds_ns(its, neighbours) for its in replicas] for replicas in self._known]
        bounds = np.sum([np.max(of_replicas, axis=0) for of_replicas in of_batches], axis=0)
        return [neighbours[at] for at in np.argsort(bounds, kind="stable")[:RESCHEDULED]]

    def _near(self, split: ModuleSplit, steps: Sequence[int]) -> list[ModuleSplit]:
        """A split that moves lead to, and the fastest neighbours, by the known micro-batches."""
        return [self._descended(split, steps), *sorted(self._nearest(split, steps), key=self.scheduled_ns)[:NEAREST]]

    def _learn(self, split: ModuleSplit) -> None:
        """Know a split's micro-batches from here on, and let plans of others of as many virtual stages follow its."""
        plans = self.results[split][1]
        if not plans or self._plans is plans:
            return
        self._plans, self._scheduled = plans, {}
        planner = self._planner(split)
        assert planner is not None, "it made these plans"
        self._known = [self._rescheduler.module_costs(plan, planner) for plan in plans]
        found = [precedent_of(planner, batch, plan) for batch, plan in zip(self._batches, plans, strict=True)]
        followed = tuple((round(EASY * each[0]), each[1]) for each in found if each is not None)
        self._precedents[len(split)] = followed

    def _descended(self, split: ModuleSplit, steps: Iterable[int]) -> ModuleSplit:
        """Where moves lead that each make the known micro-batches faster."""
        while True:
            fastest = min(self._nearest(split, steps), key=self.scheduled_ns, default=split)
            if self.scheduled_ns(fastest) >= self.scheduled_ns(split):
                return split
            split = fastest

    def predicted_ns(self, split: ModuleSplit) -> int:
        """Predicted time of the batches under the split, all together; `UNPLANNED` where one has no plan."""
        if split not in self.results:
            self.results[split] = self._planned(split, self._evaluations)
        return self.results[split][0]

    def _planned(self, split: ModuleSplit, evaluations: int | None) -> tuple[int, list[IterationPlan]]:
        """Predicted time of the batches and their plans; `UNPLANNED` and none where one has no plan."""
        planner = self._planner(split, evaluations, self._precedents.get(len(split), ()))
        plans = [] if planner is None else [_plan(planner, batch) for batch in self._batches]
        planned = [plan for plan in plans if plan is not None]
        if not planned or len(planned) < len(plans):
            return UNPLANNED, []
        return sum(plan.totals.predicted_ns for plan in planned), planned

    def scheduled_ns(self, split: ModuleSplit) -> int:
        """Time of the known micro-batches under the split, all batches together."""
        if split not in self._scheduled:
            times = [[self._rescheduler.makespan_ns(its, split) for its in replicas] for replicas in self._known]
            self._scheduled[split] = sum(map(max, times))
        return self._scheduled[split]

    def _alone(self) -> ModuleCosts:
        """Every sample as a micro-batch of its own, where there are no plans."""
        batches = [Samples.of(batch, self._model.family) for batch in self._batches[:BATCHES]]
        inputs, targets = (np.concatenate([getattr(b, name) for b in batches]) for name in ("inputs", "targets"))
        tables = self._tables[0]
        costs = tables.at_sizes(tables.at_lengths(inputs, targets), np.ones_like(inputs))
        known = (costs != ABSENT).all(axis=(1, 2))
        return self._rescheduler.of_kinds(costs[known], np.stack([inputs[known], targets[known]]))

    def _fitting(self, split: ModuleSplit) -> BoolArray:
        """Which of the different samples fit alone."""
        planner = self._planner(split)
        if planner is None:
            return np.zeros(len(self._lengths), np.bool_)
        return fits_alone(planner.problem(planner.samples(self._lengths)))

    def _feasible_batches(self) -> tuple[list[GlobalBatch], int]:
        """The batches without samples that need not fit, and how many those were."""
        lengths = zip(self._lengths.input_lengths.tolist(), self._lengths.target_lengths.tolist(), strict=True)
        fitting = dict(zip(lengths, self._required.tolist(), strict=True))
        batches = []
        for batch in self._batches:
            pairs = zip(batch.input_lengths.tolist(), batch.target_lengths.tolist(), strict=True)
            batches.append(batch.at(np.array([fitting[pair] for pair in pairs], np.bool_)))
        return batches, sum(map(len, self._batches)) - sum(map(len, batches))

    def _planner(
        self, split: ModuleSplit, evaluations: int | None = None, precedents: tuple[Precedent, ...] = ()
    ) -> Planner | None:
        """A planner for the split, or None where its model state alone does not fit."""
        settings = msgspec.structs.replace(
            self._settings,
            modules_per_stage=split,
            chunks=len(split) // self._settings.pipeline_parallel,
            schedule=replace(self._settings.schedule, search_evaluations=evaluations),
            precedents=precedents,
        )
        try:
            return planner_over(settings, self._tables, costs_digest=self._costs_digest)
        except InfeasibleError:
            return None


def _plan(planner: Planner, batch: GlobalBatch) -> IterationPlan | None:
    try:
        return planner.plan(batch, 0)
    except (PlanningError, DataError):
        return None
