"""The least work of a batch's samples, at which the search of plans of one stage ends.

A sample's least work is its share of the micro-batch that runs it best, of any size, padded or packed, whole or in
pieces, where these are allowed. Costs count as if they never fell with length (`choosing.least_costs`). A micro-batch
has no more positions than the memory that model states leave holds under the recompute modes that store the least.
`benchmarks/planning/limits.py` has bounds of plans of several stages.
"""

from functools import lru_cache

import numpy as np

from megatron_dynapipe.choosing.least_costs import BOTH, LeastCosts
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.costs import CostTables, Floats, ModelState, Quantity
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.ways.pieces import can_cut

MOST_LENGTHS = 400
"""Different samples that are told apart; of more, lengths are rounded down."""
PROVEN = 0.005
"""A plan that is so near what no plan can pass is not searched any further."""


def enough_ns(planner: Planner, samples: Samples) -> int:
    """The time of a training plan that ends its search; 0 where no plan is expected to come near its bound.

    On several stages none does: the bound knows how the pipeline fills with the shortest piece, not with rows that are
    long enough to run well, and costs more than it could save.
    """
    if planner.settings.data_parallel == 1 or not has_one_stage(planner):
        return 0
    return int((1 + PROVEN) * LeastWork(planner, samples).on_one_stage())


def has_one_stage(planner: Planner) -> bool:
    """Whether plans have one stage and chunk, on which replicas wait for one another at the end alone."""
    return planner.layout.virtual_stages == 1 and planner.settings.replicas_in_step == 1


@lru_cache(maxsize=4)
def _least_costs(tables: tuple[CostTables, ...], batch_layouts: tuple[BatchLayout, ...]) -> tuple[LeastCosts, ...]:
    """Of every mode; kept, since a run's batches have the same tables."""
    pads, packs = (layout in batch_layouts for layout in (BatchLayout.PADDED, BatchLayout.PACKED))
    return tuple(LeastCosts(under_mode, padded=pads, packed=packs) for under_mode in tables)


class LeastWork:
    """Least times of a batch's samples in modules.

    Args:
        planner: model, layout, memory, costs, what is allowed.
        samples: of the batch.
    """

    def __init__(self, planner: Planner, samples: Samples) -> None:
        s = planner.settings
        self.layout = planner.layout
        self.stages = planner.layout.stages
        self.replicas = s.data_parallel
        self.limit = s.memory_limit_bytes
        self.inputs, self.targets, self.counts = _different(samples)
        self.cut = s.may_cut and can_cut(planner.problem(samples))
        packs = BatchLayout.PACKED in s.micro_batch_layouts
        self._derives = packs and any(tables.packed is None for tables in planner.tables)
        self._modes = _least_costs(planner.tables, s.micro_batch_layouts)
        kinds = planner.tables[0].kinds
        self.modules = np.array([kinds.index(kind) for kind in self.layout.modules])
        self.state = np.zeros(len(self.modules) + 1)
        if s.model_state_bytes is None:
            self.state[1:] = self._state(planner.tables[0].state, s.distributed_optimizer)
        self.rounded_up = (1 + int(self.targets.any())) * (s.length_multiple - 1) if self._derives else 0
        self._most = self._most_positions()
        self._has_free_kind = samples.labels is not None
        if self._has_free_kind:  # the last MLP and the head, which run over labels alone, are left out
            self.modules[-2:] = len(kinds)
        self.rounding = len(self.modules) * int(self.counts.sum()) / self.replicas  # of times to whole ns

    def times(self, most: float = np.inf, *, fitting: bool = False) -> Floats:
        """A sample's share of the time of a module of each kind, forward and backward: `[modes, samples, kinds]`.

        In micro-batches of at most so many positions, as `_most_positions` counts them, or that are `fitting` the
        memory.
        """
        limits = self._most if fitting else [np.inf] * len(self._modes)
        times = [
            mode.times(self.inputs, self.targets, cut=self.cut, most=min(most, limit))
            for mode, limit in zip(self._modes, limits, strict=True)
        ]
        return self._of_kinds(np.stack(times))

    def _of_kinds(self, costs: Floats) -> Floats:
        """Costs by kind, with a kind that takes nothing if some modules run over labels alone: `[…, kinds (+ 1)]`."""
        if not self._has_free_kind:
            return costs
        return np.concatenate([costs, np.zeros_like(costs[..., :1])], axis=-1)

    def _most_positions(self) -> list[float]:
        """Positions of a micro-batch that fits the memory, under every mode, rounded up as its costs are.

        On several stages its modes may differ, so that each stage is taken for one that stores the least.
        """
        room = self.stages * self.limit - float(self.state[-1])
        stored = [mode.by_position(Quantity.STORED) for mode in self._modes]
        if self.stages > 1:
            stored = [np.min(stored, axis=0)] * len(stored)
        least = [float(kinds[self.modules].sum()) for kinds in stored]
        return [self.rounded_up + room / bytes_each if bytes_each > 0 else np.inf for bytes_each in least]

    def _state(self, state: ModelState, sharded: bool) -> Floats:
        """Bytes of model state of the first modules, experts left out, with the embedding."""
        kinds = self.layout.modules
        parameters = np.array([state.modules.get(kind, 0) for kind in kinds], np.float64)
        parameters[[kind == state.expert_kind for kind in kinds]] -= state.expert_bytes
        parameters[0] += state.embedding_bytes
        trained = parameters
        if state.trained is not None:  # all others are frozen: they have neither gradients nor an optimizer
            trained = np.array([state.trained.get(kind, 0) for kind in kinds], np.float64)
        times = state.gradient_bytes / 2 + 6 / (self.replicas if sharded else 1)
        return np.asarray(np.cumsum(parameters + trained * times))

    def everywhere(self, times: Floats) -> int:
        """All work, over all devices."""
        each = times.min(axis=0)[:, self.modules].sum(axis=1)
        total = float(each @ self.counts) / self.replicas - self.rounding
        return int(max(total / self.stages, 0)) if np.isfinite(total) else 0

    def on_one_stage(self) -> int:
        """A replica's part of all work, on one stage and chunk, whose rows have one recompute mode on all modules.

        Let f(p) be that part if no row has more than p positions, and a the least time of a position. Either a plan has
        a longer row, and takes a · p at least, or it takes f(p), which falls with p. With p = f(q) / a, f(p) is the
        less of both if q ≤ p: q = the mean positions of a replica, whose time is a · q at least.
        """
        position = self._of_kinds(np.stack([mode.by_position(BOTH) for mode in self._modes]).min(axis=0))
        of_position = float(position[self.modules].sum())
        if of_position <= 0:
            return int(self._part(np.inf))
        mean = float((self.inputs + self.targets) @ self.counts) / self.replicas
        return int(self._part(max(self._part(mean) / of_position, mean)))

    def _part(self, most: float) -> float:
        """A replica's part of all work in rows of at most so many positions, which fit the memory."""
        times = self.times(most + self.rounded_up, fitting=True)[:, :, self.modules].sum(axis=2).min(axis=0)
        total = float(times @ self.counts) / self.replicas - self.rounding
        return max(total, 0.0) if np.isfinite(total) else 0.0


def _different(samples: Samples) -> tuple[IntArray, IntArray, IntArray]:
    """Positions of inputs and targets that occur, rounded down where they are many, and how often each does."""
    pairs = np.stack([samples.input_positions, samples.target_positions])
    step = 1
    while True:
        rounded = np.where(pairs > step, pairs // step * step, np.minimum(pairs, 1))
        lengths, counts = np.unique(rounded, axis=1, return_counts=True)
        if lengths.shape[1] <= MOST_LENGTHS:
            return lengths[0], lengths[1], counts
        step *= 2
