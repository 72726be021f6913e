"""What every cut of an order of samples would cost: one value for each (first sample, micro-batch size, recompute).

This is the pure Python twin of the native core's cost lookups; tests hold the two against each other.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatron_dynapipe.cost import LayerTables, PipelineLayout, stage_costs
from megatron_dynapipe.cost.layout import StageCosts
from megatron_dynapipe.planning.problem import IntArray

UNREACHABLE = 2**61
"""Cost of what cannot be: above every sum of costs, and two of it still fit 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutProblem:
    """Samples, in some order, to be cut into micro-batches of neighbours.

    Attributes:
        inputs, targets: int64[samples], padded lengths in the order given; targets 0 for decoder-only models.
        modes: one layer's costs under each recompute mode that may be chosen, in order of preference on ties.
        layout: layers per virtual stage.
        memory_bytes: int64[ranks], what model state leaves for activations.
        in_flight: int64[options, ranks], micro-batches that a rank holds at once, sharing its memory; the order is cut
            for each option.
        replicas: data-parallel replicas that the micro-batches are dealt to.
        forward_only: no backward runs and nothing is kept for it.
    """

    inputs: IntArray
    targets: IntArray
    modes: tuple[LayerTables, ...]
    layout: PipelineLayout
    memory_bytes: IntArray
    in_flight: IntArray
    replicas: int
    forward_only: bool = False

    def reordered(self, order: IntArray) -> Self:
        """The same problem with its samples in another order, given as places in the present one."""
        return replace(self, inputs=self.inputs[order], targets=self.targets[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intervals:
    """Costs of every candidate micro-batch: int64 `[samples, largest size, modes]`, `UNREACHABLE` where infeasible.

    Entry [i, k - 1, m] is the micro-batch of samples i … i + k - 1 under mode m.
    """

    time_ns: IntArray
    """Forward and backward on its slowest rank: what it adds to a busy pipeline."""
    fill_ns: IntArray
    """Forward and backward on all other ranks: what filling and draining the pipeline with it costs."""


def rank_times(costs: StageCosts, layout: PipelineLayout, *, forward_only: bool = False) -> IntArray:
    """Forward and backward time per pipeline rank, over its chunks: int64 `[queries, ranks]`."""
    both = costs.forward_ns if forward_only else costs.forward_ns + costs.backward_ns
    return np.asarray(both.reshape(len(both), layout.chunks, layout.stages).sum(axis=1))


def needed_bytes(costs: StageCosts, problem: CutProblem, option: int) -> IntArray:
    """What each rank needs for as many micro-batches of a kind as the option has in flight: `[queries, ranks]`."""
    layout = problem.layout
    shape = (len(costs.stored_bytes), layout.chunks, layout.stages)
    stored = costs.stored_bytes.reshape(shape).sum(axis=1)
    above = (costs.peak_bytes - costs.stored_bytes).reshape(shape).max(axis=1)
    return np.asarray(stored * (1 if problem.forward_only else problem.in_flight[option]) + above)


def intervals(problem: CutProblem, option: int) -> Intervals:
    """Cost every candidate micro-batch of the problem's order under one option of micro-batches in flight."""
    samples = len(problem.inputs)
    largest = min(samples, max(int(mode.sizes[-1]) for mode in problem.modes))
    starts, sizes = np.meshgrid(np.arange(samples), np.arange(1, largest + 1), indexing="ij")
    whole = starts + sizes <= samples
    shapes = np.stack(
        [
            sizes[whole],
            _running_maximum(problem.inputs, largest)[whole],
            _running_maximum(problem.targets, largest)[whole],
        ]
    )
    distinct, where = np.unique(shapes, axis=1, return_inverse=True)
    time = np.full((samples, largest, len(problem.modes)), UNREACHABLE, np.int64)
    fill = time.copy()
    for m, tables in enumerate(problem.modes):
        costs = stage_costs(tables, problem.layout, *distinct)
        ranks = rank_times(costs, problem.layout, forward_only=problem.forward_only)
        slowest = ranks.max(axis=1)
        fitting = costs.feasible & (needed_bytes(costs, problem, option) <= problem.memory_bytes).all(axis=1)
        time[whole, m] = np.where(fitting, slowest, UNREACHABLE)[where]
        fill[whole, m] = np.where(fitting, ranks.sum(axis=1) - slowest, UNREACHABLE)[where]
    return Intervals(time_ns=time, fill_ns=fill)


def _running_maximum(lengths: IntArray, largest: int) -> IntArray:
    """[i, k - 1]: the longest of samples i … i + k - 1 (of those that there are)."""
    padded = np.concatenate([lengths, np.zeros(largest - 1, np.int64)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, largest)
    return np.asarray(np.maximum.accumulate(windows, axis=1))
