"""Improving a batch's plan by local search on its predicted time, over all choices together.

    partitions, packed rows ── assign to replicas, try orders × policies ──► the best ── mutations ──► one ── robustify

A solution is, per replica, micro-batches (samples with a layout and a recompute mode) in the order in which they enter
the pipeline, and a policy of list scheduling (`schedules.list_scheduling`). A mutation

    reorder        moves a micro-batch to another place of its replica's order, or exchanges two
    shift          moves the border between two padded micro-batches that are neighbours in the sample order
    move           moves a sample of a packed row to another micro-batch, or exchanges two
    split          one micro-batch into two
    merge          two into one, padded ones where they are neighbours
    recompute      gives a micro-batch another mode, on all virtual stages, from one on, or on one, or exchanges two's
                   modes there: half the time on the busiest stage
    layout         packs a padded micro-batch into a row, or the other way round
    change policy  changes how many micro-batches a stage may hold in flight, or the policy's rule
    reassign       gives a micro-batch to another replica, or exchanges two

and is judged by the makespan of the slowest replica, list-scheduled within every stage's memory. Worse solutions are
accepted within a margin of the best that shrinks to nothing (threshold accepting, Dueck and Scheuer 1990). With one
chunk per stage a last part robustifies: of policies and mutations that predict no longer a time, it accepts those whose
order, kept as it is, takes less time over a few draws of jitter in the passes' times.

Searches are bounded by evaluations and seeded: the same batch has the same plan anywhere. They begin with plain 1F1B
over every partition, with packed rows (`csrc/search/packed_starts.h`) or with other batches' plans (`precedents.h`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.native import PassOrder, from_codes
from megatron_dynapipe.core.partition import OrderedPartitions, Partition
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.units import BatchLayout

_logger = logging.getLogger(__name__)

DEFAULT_EVALUATIONS = -1
"""Leaves the number to the core, which knows how many micro-batches there are (`csrc/search/budget.h`)."""


@cache
def notice(message: str) -> None:
    """Say it once per process."""
    _logger.warning("notice: %s", message)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaSolution:
    """One replica's micro-batches, in the order in which they enter the pipeline.

    Attributes:
        members: samples of each micro-batch.
        batch_layouts: each micro-batch's layout.
        modes: int64[micro-batches, virtual stages], index of its recompute mode on each.
        order: passes per stage; micro-batches are numbered as they enter.
    """

    members: list[IntArray]
    batch_layouts: list[BatchLayout]
    modes: IntArray
    order: PassOrder


def _enough(problem: BatchProblem, partitions: Sequence[Partition]) -> list[tuple[IntArray, IntArray]]:
    """Sizes and modes of the partitions that have a micro-batch for each replica."""
    return [(each.sizes, each.modes) for each in partitions if len(each.sizes) >= problem.replicas]


class Start(NamedTuple):
    """The start of a search: the time of the best of its first solutions, and the most micro-batches of a replica."""

    makespan_ns: int
    rows: int


def start(problem: BatchProblem, partitioned: OrderedPartitions, most: int | None = None) -> Start | None:
    """Start a search from the given partitions; None if no start fits, or is about as fast as `most` ns."""
    partitions = _enough(problem, partitioned.partitions)
    try:
        found = problem.native.start(order=partitioned.order, partitions=partitions, most=most)
    except ValueError as error:
        raise PlanningError(f"the batch's plan cannot be searched: {error}") from error
    return None if found is None else Start(*found)


def search(
    problem: BatchProblem,
    partitioned: OrderedPartitions,
    *,
    evaluations: int | None,
    seed: int,
    following: bool = False,
) -> list[ReplicaSolution]:
    """The best solution found from the given partitions, per replica; an empty list where none fits the memory.

    Args:
        problem: samples, costs, memory, replicas.
        partitioned: where to begin.
        evaluations: schedules to try after the ones it begins with; None tries as many as take about the same time
            whatever the batch, and none on one stage of one replica.
        seed: draws the mutations.
        following: begin with the precedents alone, with few evaluations; nothing where that leads to no plan as good.

    Raises:
        PlanningError: costs or settings outside what 64-bit sums can hold; the message names which.
    """
    layout = problem.layout
    if evaluations is None:
        # On one stage of one replica nobody waits for anybody: rows of least work are all there is to find, and
        # partitions are those.
        is_alone = layout.virtual_stages == 1 and problem.replicas == 1
        evaluations = 0 if is_alone else DEFAULT_EVALUATIONS
    partitions = _enough(problem, partitioned.partitions)
    try:
        replicas = problem.native.search(
            order=partitioned.order, partitions=partitions, evaluations=evaluations, seed=seed, following=following
        )
    except ValueError as error:
        raise PlanningError(f"the batch's plan cannot be searched: {error}") from error
    return [
        ReplicaSolution(
            members=np.split(np.array(samples, np.int64), np.cumsum(sizes)[:-1]),
            batch_layouts=[BatchLayout.PACKED if is_row else BatchLayout.PADDED for is_row in packed],
            modes=np.array(modes, np.int64).reshape(-1, layout.virtual_stages),
            order=from_codes(np.array(passes, np.int64).reshape(layout.stages, -1), layout.chunks),
        )
        for samples, sizes, modes, packed, passes, _ in replicas
    ]
