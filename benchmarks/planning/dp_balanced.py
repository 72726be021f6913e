"""Rows as Megatron-LM's packing scheduler makes them, to train and to compare with.

`DpBalancedScheduler` in core/datasets/data_schedule.py, commit d48bd6be, dev: next fit in the given order; single
samples leave the last rows until the number of rows is a multiple of the replicas (and of the stages, with virtual
ones). verl's and slime's rows were faster in every case that was predicted, so `compare` has those.
"""

from collections.abc import Sequence

import msgspec

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.partition import OrderedPartitions
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.ways.rivals import packed
from megatron_dynapipe.ways.rivals.rules import Room, Rows


def dp_balanced(lengths: Sequence[int], room: Room) -> Rows:
    """Next fit in the given order, to a multiple of the replicas by moving last samples to rows of their own."""
    rows: Rows = [[]]
    used = 0
    for sample, length in enumerate(lengths):
        if rows[-1] and used + length > room.positions:
            rows.append([])
            used = 0
        rows[-1].append(sample)
        used += length
    multiple = room.replicas * room.group
    giver = len(rows) - 1
    while len(rows) % multiple:
        while giver >= 0 and len(rows[giver]) == 1:
            giver -= 1
        if giver < 0:
            return []
        rows.append([rows[giver].pop()])
    return rows


class DpBalanced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `core.partition.Partitioner`: `dp_balanced`, in rows of the best size from the longest sample on.

    Attributes:
        longest: most input positions of a row at first.
    """

    longest: int

    @property
    def layout(self) -> BatchLayout:
        """Packed rows."""
        return BatchLayout.PACKED

    def pad(self, samples: Samples) -> Samples:
        """The samples as they are."""
        return samples

    def partitions(self, problem: BatchProblem, order: IntArray, *, hidden_size: int) -> OrderedPartitions:
        """Every partition that fits with one micro-batch in flight; raises PlanningError where there is no rule."""
        return packed.partitions(problem, packed.rows_of_rule(problem, dp_balanced, self.longest, hidden_size))
