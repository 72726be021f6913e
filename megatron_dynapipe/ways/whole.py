"""Micro-batches of whole samples."""

from collections.abc import Sequence
from functools import partial

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.partition import OrderedPartitions, candidate_orders, partition
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.core.ways import Candidate


class WholeSamples:
    """Padded micro-batches by dynamic programming, and the packed rows that a search makes to start with.

    If packed rows cost what is derived from padded micro-batches, they cost no more than these: then partitions can
    wait until a search finds no rows.
    """

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """One candidate."""
        orders = candidate_orders(problem.inputs, problem.targets)
        rows = OrderedPartitions(order=orders[0])
        padded = partial(partition, problem, orders, improve=len(orders) > 1)
        of_samples = partial(Candidate, samples=samples, problem=problem, is_default=True)
        if BatchLayout.PADDED not in problem.batch_layouts:
            return [of_samples(partitioned=rows)]
        derived = all(tables.packed is None for tables in problem.modes)
        if derived and BatchLayout.PACKED in problem.batch_layouts:
            return [of_samples(partitioned=rows, fallback=padded)]
        return [of_samples(partitioned=padded())]
