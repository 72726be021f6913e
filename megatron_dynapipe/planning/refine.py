"""Bettering an order by moving samples between the micro-batches it is cut into: the Python twin of csrc/refine.cpp.

A cut of a sorted order leaves micro-batches that one or two long inputs or targets stretch. Those samples are moved to
wherever they cost least, while that saves time; the micro-batches one after another are the new order, which cut again
costs no more than before.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from megatron_dynapipe.cost import stage_costs
from megatron_dynapipe.planning.intervals import UNREACHABLE, CutProblem, needed_bytes, rank_times
from megatron_dynapipe.planning.problem import IntArray

MOST_MOVED = 20
"""Samples moved at once."""

REACH = 48
"""Micro-batches on either side that may take them."""

EVALUATIONS_PER_SAMPLE = 4000
"""Micro-batches costed, so that the time grows with the batch."""


@dataclass(slots=True)
class _Group:
    """Samples that run together, their padded lengths, and the least time in which they do."""

    members: list[int]
    input: int = 0
    target: int = 0
    time: int = 0

    def copy(self) -> Self:
        return type(self)(list(self.members), self.input, self.target, self.time)


@dataclass(slots=True)
class Refiner:
    """Moves samples between the micro-batches of one cut.

    Attributes:
        problem: the order that was cut.
        option: of micro-batches in flight.
        fill_ns: no micro-batch may fill the pipeline for longer.
    """

    problem: CutProblem
    option: int
    fill_ns: int
    _left: int = field(init=False)
    _inputs: list[int] = field(init=False)
    _targets: list[int] = field(init=False)
    _times: dict[tuple[int, int], list[int]] = field(default_factory=dict, init=False)
    _groups: list[_Group] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._left = EVALUATIONS_PER_SAMPLE * len(self.problem.inputs)
        self._inputs, self._targets = self.problem.inputs.tolist(), self.problem.targets.tolist()

    def run(self, sizes: IntArray) -> IntArray:
        """The new order, as places in the present one, of a cut into micro-batches of these sizes."""
        ends = np.cumsum(sizes).tolist()
        self._groups = [self._measured(list(range(end - size, end))) for size, end in zip(sizes, ends, strict=True)]
        moved = True
        while moved:
            moved = False
            for index in range(len(self._groups)):
                for lengths in (self._inputs, self._targets):
                    if self._left > 0 and self._relieve(index, lengths):
                        moved = True
        return np.array([sample for group in self._groups for sample in group.members], np.int64)

    def _time(self, size: int, input_length: int, target_length: int) -> int:
        """The least time of a micro-batch over the recompute modes under which it fits."""
        self._left -= 1
        if size == 0:
            return 0
        key = (input_length, target_length)
        if key not in self._times:
            self._times[key] = self._by_size(*key)
        return self._times[key][size - 1]

    def _by_size(self, input_length: int, target_length: int) -> list[int]:
        sizes = np.arange(1, len(self._inputs) + 1)
        lengths = np.full_like(sizes, input_length), np.full_like(sizes, target_length)
        least = np.full(len(sizes), UNREACHABLE)
        for mode in self.problem.modes:
            costs = stage_costs(mode, self.problem.layout, sizes, *lengths)
            ranks = rank_times(costs, self.problem.layout, forward_only=self.problem.forward_only)
            slowest = ranks.max(axis=1)
            fits = (needed_bytes(costs, self.problem, self.option) <= self.problem.memory_bytes).all(axis=1)
            fits &= costs.feasible & (ranks.sum(axis=1) - slowest <= self.fill_ns)
            least = np.where(fits, np.minimum(least, slowest), least)
        return [int(time) for time in least]

    def _measured(self, members: list[int]) -> _Group:
        longest_input = max((self._inputs[sample] for sample in members), default=0)
        longest_target = max((self._targets[sample] for sample in members), default=0)
        return _Group(members, longest_input, longest_target, self._time(len(members), longest_input, longest_target))

    def _relieve(self, index: int, lengths: list[int]) -> bool:
        """Move the fewest longest samples of a micro-batch whose move saves time."""
        members = sorted(self._groups[index].members, key=lambda sample: -lengths[sample])
        for moved in range(1, min(MOST_MOVED, len(members)) + 1):
            if self._left <= 0:
                break
            if moved < len(members) and lengths[members[moved]] == lengths[members[moved - 1]]:
                continue
            rest = self._measured(members[moved:])
            if rest.time >= UNREACHABLE:
                continue
            if self._place(index, members[:moved], self._groups[index].time - rest.time):
                self._groups[index] = rest
                return True
        return False

    def _place(self, source: int, samples: list[int], saved: int) -> bool:
        """Put samples where each costs least, if all together cost less than `saved`."""
        before: list[tuple[int, _Group]] = []
        nearby = range(max(source - REACH, 0), min(source + REACH + 1, len(self._groups)))
        for sample in samples:
            taker, least = -1, saved
            for index in nearby:
                group = self._groups[index]
                if index == source or not group.members:
                    continue
                cost = self._time_with(group, sample) - group.time
                if cost < least:
                    taker, least = index, cost
            if taker < 0:
                for index, group in reversed(before):
                    self._groups[index] = group
                return False
            group = self._groups[taker]
            before.append((taker, group.copy()))
            group.members.append(sample)
            group.input = max(group.input, self._inputs[sample])
            group.target = max(group.target, self._targets[sample])
            group.time += least
            saved -= least
        return True

    def _time_with(self, group: _Group, sample: int) -> int:
        longest_input = max(group.input, self._inputs[sample])
        return self._time(len(group.members) + 1, longest_input, max(group.target, self._targets[sample]))
