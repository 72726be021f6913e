"""Partitions in place of dynamic programming and the search, for plans that are made to compare with."""

from typing import Protocol, runtime_checkable

from megatron_dynapipe.planning.partition import OrderedPartitions
from megatron_dynapipe.planning.problem import BatchProblem, IntArray
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.units import BatchLayout


@runtime_checkable
class Partitioner(Protocol):
    """A rule by which another trainer, or an earlier paper, makes micro-batches; a frozen `msgspec.Struct`.

    Its values are part of the settings' digest.
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
            hidden_size: of the model, for rules that count floating-point operations.
        """
        ...
