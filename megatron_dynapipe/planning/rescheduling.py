"""Known micro-batches under another layer split: list-scheduled within memory, messages counted, without planning anew.

A choice of a layer split compares hundreds of splits. What each comes to with the micro-batches of a plan takes a
millisecond; a plan of its own, which may have other micro-batches and modes, takes hundreds.
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from megatron_dynapipe.cost.layout import PipelineLayout, Split
from megatron_dynapipe.cost.model import CostModel
from megatron_dynapipe.cost.packed import packed_costs
from megatron_dynapipe.cost.tables import ABSENT, CostTables, Quantity
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch
from megatron_dynapipe.planning.native import NEVER, core
from megatron_dynapipe.planning.problem import IntArray
from megatron_dynapipe.planning.schedules.list_scheduling import Rule
from megatron_dynapipe.planning.schedules.one_f_one_b import filling_depths
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.units import BatchLayout, Recompute, input_positions, target_positions

_DEEPENINGS, _RULES = (1, 8), (Rule.BACKWARD_FIRST, Rule.FORWARD_FIRST)
"""Of the policies that are tried, as a search begins with them."""
_UNDIVIDED, _LEAST_GAP = -1, 2
"""Quarters of a second half of a backward pass that a wait must last for the half to run, as a search begins; whole
passes."""

_MEMORY = (1.0, 1.05, 1.1, 1.2, 1.4, 2.0)
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

    def __init__(self, settings: PlannerSettings, cost_model: CostModel, counting: float) -> None:
        """Schedules for a run.

        Args:
            settings: of the run; their layer split does not matter.
            cost_model: what layers cost.
            counting: share of positions that count, over which alone the last MLP and the head run.
        """
        self.settings, self._counting = settings, counting
        self._tables: dict[Recompute, CostTables] = {
            mode: settings.tables(cost_model, mode) for mode in settings.recompute
        }
        tables = next(iter(self._tables.values()))
        self._state = tables.state
        self._modules = [tables.kinds.index(kind) for kind in settings.layout.modules]
        self._peak_covers_backward = any(tables.peak_covers_backward for tables in self._tables.values())

    def module_costs(self, plan: IterationPlan, split: Split) -> list[ModuleCosts]:
        """The micro-batches of the replicas of a plan under a split, every module with its stage's recompute mode."""
        replicas, layout = [], self._layout(split)
        stage_of = np.searchsorted(layout.cuts, np.arange(len(layout.modules)), side="right")
        for replica in plan.replicas:
            batches = [batch for batch in replica.micro_batches if not batch.is_filler]
            if batches:
                values = np.stack([self._module_costs(batch, stage_of) for batch in batches])
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

    def bound_ns(self, micro_batches: ModuleCosts, split: Split) -> int:
        """Work of the busiest stage, and the longest warm-up and drain around it, memory left aside."""
        layout, values = self._layout(split), micro_batches.values
        times = np.cumsum(values[:, :, Quantity.FORWARD] + values[:, :, Quantity.BACKWARD], axis=1)
        ends = np.diff(times[:, [*(layout.cuts - 1), -1]], axis=1, prepend=0)
        by_stage = ends.reshape(len(values), layout.chunks, layout.stages).sum(axis=1)
        around = (by_stage.sum(axis=1) - by_stage.max(axis=1)).max(initial=0)
        return int(by_stage.sum(axis=0).max(initial=0) + around)

    def _layout(self, split: Split) -> PipelineLayout:
        chunks = len(split) // self.settings.pipeline_parallel
        return replace(self.settings.layout, layers_per_stage=split, chunks=chunks)

    def makespan_ns(self, micro_batches: ModuleCosts, split: Split) -> int:
        """Predicted time under a split, longer by the share of memory that lacks; `NEVER` where too much does."""
        s, layout = self.settings, self._layout(split)
        state = np.array(s.model_state_bytes or (), np.int64)
        if s.model_state_bytes is None:
            replicas, sharded = s.data_parallel, s.distributed_optimizer
            state = layout.model_state_bytes(self._state, data_parallel=replicas, distributed_optimizer=sharded)
        costs = self._stage_costs(micro_batches, layout.cuts, 2 * s.encoder_layers)
        filling = filling_depths(layout.stages, layout.chunks)[:-1]
        depths = [np.array([*(depth + more for depth in filling), 1], np.int64) for more in _DEEPENINGS]
        for memory in _MEMORY:
            best = NEVER
            for depth, rule in product(depths, _RULES):
                makespan, _ = core.list_schedule(
                    costs,
                    layout.chunks,
                    state,
                    int(s.memory_limit_bytes * memory),
                    False,
                    depth,
                    int(rule),
                    self._peak_covers_backward,
                    _UNDIVIDED if s.effective_split_backward == "off" else _LEAST_GAP,
                    best,
                )
                best = min(best, makespan)
            if best < NEVER:
                return int(best * memory)
        return NEVER

    def _stage_costs(self, micro_batches: ModuleCosts, cuts: IntArray, encoder_modules: int) -> list[IntArray]:
        """Costs on every virtual stage, in the order of `ScheduleProblem.cost_arrays`."""
        s, values = self.settings, micro_batches.values
        before = np.concatenate([np.zeros_like(values[:, :1]), np.cumsum(values, axis=1)], axis=1)
        starts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [values.shape[1]]])
        sums, first_module = before[:, ends] - before[:, starts], values[:, starts]
        entry = first_module[:, :, Quantity.ENTRY_STORED]
        sums[:, :, Quantity.STORED] += entry
        stored = before[:, :, Quantity.STORED]
        peaks = np.maximum.reduceat(stored[:, :-1] + values[:, :, Quantity.PEAK], starts, axis=1)
        peaks = np.maximum(peaks - stored[:, starts] + entry, first_module[:, :, Quantity.ENTRY_PEAK])
        inputs, targets = micro_batches.positions[:, :, None]
        forward, backward = inputs + targets * (cuts > encoder_modules), inputs + targets * (cuts >= encoder_modules)
        links = s.network.links(
            virtual_stages=len(starts),
            stages=s.pipeline_parallel,
            ranks_per_stage=s.data_parallel * s.tensor_parallel,
            tensor_parallel=s.tensor_parallel,
            sequence_parallel=s.sequence_parallel,
            scatter_gather=s.scatter_gather,
        )
        sent = s.hidden_size * s.element_bytes
        kept = sent // (s.tensor_parallel if s.sequence_parallel else 1)
        first, last = ((0, 0), (1, 0)), ((0, 0), (0, 1))
        weights = sums[:, :, Quantity.WEIGHT] * (s.effective_split_backward != "off")
        costs = [
            sums[:, :, Quantity.FORWARD],
            sums[:, :, Quantity.BACKWARD],
            sums[:, :, Quantity.STORED],
            np.maximum(peaks, sums[:, :, Quantity.STORED]),
            np.pad(links.transfer_ns(forward * sent), last),
            np.pad(links.transfer_ns(backward * sent), first),
            np.minimum(weights, sums[:, :, Quantity.BACKWARD]),
            np.pad(forward * kept, last),
            np.pad(backward * kept, first),
        ]
        return [np.ascontiguousarray(array) for array in costs]

    def _module_costs(self, micro_batch: MicroBatch, stage_of: IntArray) -> IntArray:
        """Costs of a planned micro-batch's modules, given their virtual stages: int64[modules, len(Quantity)]."""
        under = {mode: self._costs_under(mode, micro_batch) for mode in set(micro_batch.recompute)}
        stages = zip(self._modules, stage_of.tolist(), strict=True)
        return np.stack([under[micro_batch.recompute[stage]][kind] for kind, stage in stages])

    def _costs_under(self, mode: Recompute, micro_batch: MicroBatch) -> IntArray:
        """Costs of a planned micro-batch by kind of module, under one mode: int64[kinds, len(Quantity)]."""
        tables, family = self._tables[mode], self.settings.family
        if micro_batch.layout is BatchLayout.PACKED:
            inputs = np.array([input_positions(family, n) for n in micro_batch.input_lengths], np.int64)
            targets = np.array([target_positions(family, n) for n in micro_batch.target_lengths], np.int64)
            row = packed_costs(tables, inputs, targets)
            assert row is not None
            return row
        size, inputs, targets = (np.array([number], np.int64) for number in micro_batch.shape)
        costs: IntArray = tables.at_sizes(tables.at_lengths(inputs, targets), size)[0]
        return costs
