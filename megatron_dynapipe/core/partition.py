"""Orders of samples, and their exact partitions into micro-batches of least predicted iteration time (paper section 4).

Neighbours in an order have similar lengths, so that micro-batches of neighbours waste little padding. Decoder-only
samples are sorted. Encoder–decoder samples have two lengths, and no order suits both: two sweeps are tried, and local
search improves both.

A pipeline of n stages that runs micro-batches of slowest-stage times t_m takes about Σ t_m on its slowest stage, and
before and after that the time in which the other stages warm up and drain. The objective, over all partitions of the
order and all recompute modes of each micro-batch, is

    max_m warmup_m / chunks + Σ_m time_m / replicas,

with time_m the time of m on its slowest stage and warmup_m its time on all others together. On even stages this is the
paper's (stages - 1) · t_max + total / replicas.

For a given bound F on the warm-up, the least total G(F) is a shortest path over the order. G never grows with F, so
after solving for F every smaller bound F' costs at least F' / chunks + G(F) / replicas: bounds that cannot beat the
best known partition are skipped, no candidate is thinned away (`csrc/search/partition.cpp`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.units import BatchLayout

BAND_RATIO = 5
"""Longest over shortest target within a band of `by_bands`."""


def candidate_orders(inputs: IntArray, targets: IntArray) -> list[IntArray]:
    """The orders to choose from.

    Args:
        inputs: int64[samples], padded input lengths.
        targets: int64[samples], padded target lengths, all 0 for decoder-only models.
    """
    one = by_length(inputs, targets)
    return [one, by_bands(inputs, targets)] if targets.any() else [one]


def by_length(inputs: IntArray, targets: IntArray) -> IntArray:
    """Longest first, by input length and then by target length; equal samples in the order given."""
    return np.lexsort((np.arange(len(inputs)), -targets, -inputs)).astype(np.int64)


def by_bands(inputs: IntArray, targets: IntArray) -> IntArray:
    """Bands of similar target lengths, the longest first; within them by input length, down and up in turn.

    Alternating joins bands where their inputs have similar lengths.
    """
    order = np.lexsort((np.arange(len(inputs)), -targets))
    descending = targets[order]
    bands: list[IntArray] = []
    start = 0
    while start < len(order):
        end = start + int(np.searchsorted(-descending[start:], -descending[start] / BAND_RATIO, side="right"))
        band = order[start:end]
        sign = 1 if len(bands) % 2 else -1
        bands.append(band[np.lexsort((band, -targets[band], sign * inputs[band]))])
        start = end
    return np.concatenate(bands).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Micro-batches as runs of an order: int64[micro-batches] each.

    Attributes:
        sizes: samples of each micro-batch, in order; they add up to all samples.
        modes: index of its recompute mode.
        layout: the layout of all of them.
        order: its own, int64[samples]; None: that of all partitions.
        in_turn: micro-batch i runs on replica i mod replicas; else they are assigned by their times.
    """

    sizes: IntArray
    modes: IntArray
    layout: BatchLayout = BatchLayout.PADDED
    order: IntArray | None = None
    in_turn: bool = False

    def members(self, order: IntArray) -> list[IntArray]:
        """The samples of each micro-batch, given the order of all partitions."""
        return [*np.split(order if self.order is None else self.order, np.cumsum(self.sizes)[:-1])]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderedPartitions:
    """An order of the problem's samples, and the partitions of it that are to be scheduled.

    Attributes:
        order: int64[samples].
        partitions: cuts of the order into micro-batches.
    """

    order: IntArray
    partitions: tuple[Partition, ...] = ()


def partition(problem: BatchProblem, orders: Sequence[IntArray], *, improve: bool) -> OrderedPartitions:
    """The best of the given orders, and its partition of least objective for each option of micro-batches in flight.

    Orders are compared by their partitions for the last option, after a local search has improved each if `improve`
    (`csrc/search/improve_order.h`). Of partitions of equal objective, that of the smallest warm-up is taken; then,
    from the first sample on, that of the smallest micro-batch and the earliest recompute mode. Options under which no
    partition fits are left out.

    Args:
        problem: samples, costs, memory.
        orders: every sample once each, int64[samples].
        improve: the orders before they are partitioned.

    Raises:
        PlanningError: costs whose sums do not fit 64 bits.
    """
    try:
        order, partitions = problem.native.partition(orders=list(orders), improve=improve)
    except ValueError as error:
        raise PlanningError(f"the batch cannot be partitioned: {error}") from error
    return OrderedPartitions(
        order=np.array(order, np.int64),
        partitions=tuple(
            Partition(sizes=np.array(sizes, np.int64), modes=np.array(modes, np.int64))
            for sizes, modes, _, _ in partitions
            if sizes
        ),
    )


@runtime_checkable
class Partitioner(Protocol):
    """A rule by which another trainer, or an earlier paper, makes micro-batches, for plans to compare with.

    A frozen `msgspec.Struct`, whose values are part of the settings' digest.
    """

    @property
    def layout(self) -> BatchLayout:
        """The layout of the micro-batches that it makes."""
        ...

    def pad(self, samples: Samples) -> Samples:
        """The samples with the lengths that they are padded to; raises DataError where one is longer."""
        ...

    def partitions(self, problem: BatchProblem, order: IntArray, *, hidden_size: int) -> OrderedPartitions:
        """Every partition that the rule offers and that fits with one micro-batch in flight.

        Args:
            problem: samples, costs, memory.
            order: every sample once, the longest first: int64[samples].
            hidden_size: the model's, for rules that count floating-point operations.
        """
        ...
