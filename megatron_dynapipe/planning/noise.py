"""How a fixed order of passes fares when passes take other times than predicted: the twin of `csrc/noise.cpp`.

A few draws, always the same: in each, every pass takes up to 30% more or less, by its place in the order, its rank and
its direction.
"""

from collections.abc import Sequence

from megatron_dynapipe.planning.moves import Random
from megatron_dynapipe.planning.schedules.list_scheduling import RowCosts

DRAWS = 8
_SPREAD = 307
"""Of 1024: 30%."""


class NoisyReplay:
    """Replays orders under every draw."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._draws: list[tuple[Random, list[int]]] = [(Random(draw), []) for draw in range(DRAWS)]
        """Random numbers and, of them, factors of [micro-batches][ranks][forward, backward], in 1024ths."""

    def total(self, rows: Sequence[RowCosts], forwards: Sequence[Sequence[int]]) -> int:
        """The sum of the makespans over all draws, for 1 per forward and 0 per backward of each rank."""
        for random, factors in self._draws:
            while len(factors) < 2 * self._stages * len(rows):
                factors.append(1024 - _SPREAD + random.below(2 * _SPREAD + 1))
        return sum(self._makespan(rows, forwards, factors) for _, factors in self._draws)

    def _makespan(self, rows: Sequence[RowCosts], forwards: Sequence[Sequence[int]], factors: list[int]) -> int:
        ranks = range(self._stages)
        free, ran_forward, ran_backward = ([0] * self._stages for _ in range(3))
        input_ready: list[list[int]] = [[0] * len(rows), *([] for _ in ranks[1:])]
        gradient_ready: list[list[int]] = [[] for _ in ranks]
        left = sum(map(len, forwards))
        while left:
            for rank in ranks:
                while ran_forward[rank] + ran_backward[rank] < len(forwards[rank]):
                    forward = forwards[rank][ran_forward[rank] + ran_backward[rank]]
                    done, arrived = (ran_forward, input_ready) if forward else (ran_backward, gradient_ready)
                    row = done[rank]
                    if row >= len(arrived[rank]):
                        break
                    times = rows[row].forward_ns if forward else rows[row].backward_ns
                    time = times[rank] * factors[2 * (row * self._stages + rank) + (not forward)] // 1024
                    free[rank] = max(free[rank], arrived[rank][row]) + time
                    done[rank] += 1
                    left -= 1
                    if forward and rank + 1 < self._stages:
                        input_ready[rank + 1].append(free[rank] + rows[row].forward_transfer_ns[rank])
                    elif forward:
                        gradient_ready[rank].append(free[rank])
                    elif rank > 0:
                        gradient_ready[rank - 1].append(free[rank] + rows[row].backward_transfer_ns[rank])
        return max(free)
