"""The least work of a batch's samples, which bounds the time of every plan.

A sample's least work is its share of the micro-batch that runs it best, of any size, padded or packed, whole or in
pieces, where these are allowed. Costs count as if they never fell with length (`choosing.least_costs`).
`benchmarks/planning/limits.py` has bounds that know of memory and of how pipelines fill.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_dynapipe.choosing.least_costs import LeastCosts
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.costs import CostTables, Floats
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.ways.pieces import can_cut

MOST_LENGTHS = 400
"""Different samples that are told apart; of more, lengths are rounded down."""


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
        self.inputs, self.targets, self.counts = _different(samples)
        self.cut = s.may_cut and can_cut(planner.problem(samples))
        self._modes = _least_costs(planner.tables, s.micro_batch_layouts)
        kinds = planner.tables[0].kinds
        self.modules = np.array([kinds.index(kind) for kind in self.layout.modules])
        self._has_free_kind = samples.labels is not None
        if self._has_free_kind:  # the last MLP and the head, which run over labels alone, are left out
            self.modules[-2:] = len(kinds)
        self.rounding = len(self.modules) * int(self.counts.sum()) / self.replicas  # of times to whole ns

    def times(self, most: Sequence[float] | None = None) -> Floats:
        """A sample's share of the time of a module of each kind, forward and backward: `[modes, samples, kinds]`.

        Args:
            most: positions of a micro-batch under each mode; None where any will do.
        """
        limits = [np.inf] * len(self._modes) if most is None else most
        times = [
            mode.times(self.inputs, self.targets, cut=self.cut, most=limit)
            for mode, limit in zip(self._modes, limits, strict=True)
        ]
        return self._of_kinds(np.stack(times))

    def _of_kinds(self, costs: Floats) -> Floats:
        """Costs by kind, with a kind that takes nothing if some modules run over labels alone: `[…, kinds (+ 1)]`."""
        if not self._has_free_kind:
            return costs
        return np.concatenate([costs, np.zeros_like(costs[..., :1])], axis=-1)

    def everywhere(self, times: Floats) -> int:
        """All work, over all devices."""
        each = times.min(axis=0)[:, self.modules].sum(axis=1)
        total = float(each @ self.counts) / self.replicas - self.rounding
        return int(max(total / self.stages, 0)) if np.isfinite(total) else 0


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
