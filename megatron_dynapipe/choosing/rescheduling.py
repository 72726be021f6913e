"""Known micro-batches under another layer split: list-scheduled within memory, messages counted, without planning anew.

A choice of a layer split compares hundreds of splits. What each comes to with the micro-batches of a plan takes a
millisecond; a plan of its own, which may have other micro-batches and modes, takes hundreds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations

import numpy as np

from megatron_dynapipe.choosing.planner import links_of
from megatron_dynapipe.core.batch import GlobalBatch, Samples
from megatron_dynapipe.core.costs import ABSENT, CostTables, Quantity
from megatron_dynapipe.core.model import ModuleSplit, PipelineLayout
from megatron_dynapipe.core.native import core
from megatron_dynapipe.core.network import Links
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import IntArray, native_links
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, Recompute
from megatron_dynapipe.costing.state import model_state_bytes

_MEMORY = np.array([1.0, 1.05, 1.1, 1.2, 1.4, 2.0])
"""Of what there is, tried in turn: a plan of its own would recompute more, or run smaller micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleCosts:
    """Micro-batches of one replica in the order in which they enter the pipeline.

    Attributes:
        values: int64[micro-batches, modules, len(Quantity)].
        positions: int64[2, micro-batches], padded input and target positions.
    """

    values: IntArray
    positions: IntArray


class Rescheduler:
    """Schedules micro-batches under layer splits."""

    def __init__(self, settings: PlannerSettings, tables: Sequence[CostTables], counting: float) -> None:
        """Schedules for a run.

        Args:
            settings: of the run; their layer split does not matter.
            tables: modules' costs under every recompute mode of the settings.
            counting: share of positions that count, over which alone the last MLP and the head run.
        """
        self.settings = settings
        self._counting = counting
        self._tables: dict[Recompute, CostTables] = dict(zip(settings.recompute, tables, strict=True))
        self._state = tables[0].state
        self._modules = [tables[0].kinds.index(kind) for kind in settings.layout.modules]
        self._peak_covers_backward = any(tables.peak_covers_backward for tables in self._tables.values())

    def module_costs(self, plan: IterationPlan, planner: Planner) -> list[ModuleCosts]:
        """The micro-batches of a plan's replicas, every module with its stage's recompute mode.

        Args:
            plan: of some batch.
            planner: made the plan.
        """
        layout = planner.layout
        stage_of = np.searchsorted(layout.cuts, np.arange(len(layout.modules)), side="right")
        replicas = []
        for replica in plan.replicas:
            batches = [batch for batch in replica.micro_batches if not batch.is_filler]
            if batches:
                under = self._costs_under_modes(batches, planner)
                values = np.stack([self._by_module(row, batch, under, stage_of) for row, batch in enumerate(batches)])
                positions = [(size * inputs, size * targets) for size, inputs, targets in (b.shape for b in batches)]
                replicas.append(self.of_modules(values, np.array(positions, np.int64).T))
        return replicas

    def of_kinds(self, values: IntArray, positions: IntArray) -> ModuleCosts:
        """Micro-batches whose costs are given by kind of module: int64[micro-batches, kinds, len(Quantity)]."""
        return self.of_modules(values[:, self._modules], positions)

    def of_modules(self, values: IntArray, positions: IntArray) -> ModuleCosts:
        """Micro-batches whose costs are given by module: int64[micro-batches, modules, len(Quantity)]."""
        by_module = np.where(values == ABSENT, 0, values)
        times = [Quantity.FORWARD, Quantity.BACKWARD, Quantity.WEIGHT]
        last = by_module[:, -2:, times] * self._counting
        by_module[:, -2:, times] = np.rint(last).astype(np.int64)
        return ModuleCosts(values=by_module, positions=positions)

    def bounds_ns(self, micro_batches: ModuleCosts, splits: Sequence[ModuleSplit]) -> IntArray:
        """Of splits over as many stages: work of the busiest one, and the longest warm-up and drain around it.

        Memory is left aside.
        """
        stages = self.settings.pipeline_parallel
        values = micro_batches.values
        both = values[:, :, Quantity.FORWARD] + values[:, :, Quantity.BACKWARD]
        times = np.pad(np.cumsum(both, axis=1), ((0, 0), (1, 0)))
        ends = np.cumsum(splits, axis=1)
        ends[:, -1] = both.shape[1]  # with the head
        by_virtual_stage = np.diff(times[:, ends], axis=2, prepend=0)
        by_stage = by_virtual_stage.reshape(len(values), len(splits), -1, stages).sum(axis=2)
        around = (by_stage.sum(axis=2) - by_stage.max(axis=2)).max(axis=0, initial=0)
        return np.asarray(by_stage.sum(axis=0).max(axis=1, initial=0) + around)

    def _layout(self, split: ModuleSplit) -> PipelineLayout:
        chunks = len(split) // self.settings.pipeline_parallel
        return replace(self.settings.layout, modules_per_stage=split, chunks=chunks)

    def makespan_ns(self, micro_batches: ModuleCosts, split: ModuleSplit) -> int:
        """Predicted time under a split, longer by the share of memory that lacks; 2^61 where too much does."""
        s = self.settings
        layout = self._layout(split)
        state = np.array(s.model_state_bytes or (), np.int64)
        if s.model_state_bytes is None:
            state = model_state_bytes(
                layout, self._state, data_parallel=s.data_parallel, distributed_optimizer=s.distributed_optimizer
            )
        return core.reschedule(
            values=np.ascontiguousarray(micro_batches.values),
            cuts=layout.cuts,
            inputs=np.ascontiguousarray(micro_batches.positions[0]),
            targets=np.ascontiguousarray(micro_batches.positions[1]),
            chunks=layout.chunks,
            model_state=state,
            memory_limit=s.memory_limit_bytes,
            peak_covers_backward=self._peak_covers_backward,
            divided=s.effective_split_backward != "off",
            shares=_MEMORY,
            **native_links(layout, self._links(layout.virtual_stages), s.sent_per_position, s.held_per_position),
        )

    @cache  # noqa: B019 -- of a few numbers, and a rescheduler lives as long as a choice
    def _links(self, virtual_stages: int) -> Links:
        return links_of(self.settings, virtual_stages)

    def _by_module(
        self, row: int, micro_batch: MicroBatch, under: Mapping[Recompute, IntArray], stage_of: IntArray
    ) -> IntArray:
        """Costs of a micro-batch's modules, given their virtual stages: int64[modules, len(Quantity)]."""
        stages = zip(self._modules, stage_of.tolist(), strict=True)
        return np.stack([under[micro_batch.recompute[stage]][row, kind] for kind, stage in stages])

    def _costs_under_modes(self, batches: Sequence[MicroBatch], planner: Planner) -> dict[Recompute, IntArray]:
        """Costs by kind of module, under every mode that is used: int64[micro-batches, kinds, len(Quantity)]."""
        used = {mode for batch in batches for mode in batch.recompute}
        packed = np.array([batch.layout is BatchLayout.PACKED for batch in batches], np.bool_)
        shapes = np.array([batch.shape for batch in batches], np.int64)[~packed].T
        rows = [batch for batch in batches if batch.layout is BatchLayout.PACKED]
        costs = {}
        for number, (mode, tables) in enumerate(self._tables.items()):
            if mode not in used:
                continue
            values = np.zeros((len(batches), len(tables.kinds), len(Quantity)), np.int64)
            if not packed.all():
                values[~packed] = tables.at_sizes(tables.at_lengths(shapes[1], shapes[2]), shapes[0])
            if rows:
                values[packed] = _packed_costs(rows, number, planner).reshape(-1, *values.shape[1:])
            costs[mode] = values
        return costs


def neighbours_of(split: ModuleSplit, steps: Iterable[int]) -> list[ModuleSplit]:
    """Splits with so many modules moved from one stage to another."""
    neighbours = []
    for step in steps:
        for source, destination in permutations(range(len(split)), 2):
            if split[source] > step:
                counts = list(split)
                counts[source] -= step
                counts[destination] += step
                neighbours.append(tuple(counts))
    return neighbours


def share_that_counts(batches: Sequence[GlobalBatch]) -> float:
    """Of the positions of batches of decoder-only samples."""
    counted = positions = 0
    for batch in batches:
        positions += int(batch.input_lengths.sum())
        labels = batch.input_lengths if batch.labels is None else batch.labels
        counted += int(labels.sum())
    return counted / max(positions, 1)


def _packed_costs(rows: Sequence[MicroBatch], mode: int, planner: Planner) -> IntArray:
    """Costs of packed rows by kind of module and quantity, as the core prices them: a row of it for each."""
    inputs = np.concatenate([row.input_lengths for row in rows])
    targets = np.concatenate([row.target_lengths for row in rows])
    settings = planner.settings
    samples = Samples.of(GlobalBatch.of_lengths(inputs, targets), settings.model.family, settings.length_multiple)
    problem = replace(planner.problem(samples), every_quantity=True)
    sizes = np.array([len(row.input_lengths) for row in rows], np.int64)
    modes = np.full(len(rows), mode, np.int64)
    return problem.native.packed_modules(samples=np.arange(len(inputs)), sizes=sizes, modes=modes)[0]
