"""Messages between stages with different numbers of replicas, sliced along the batch.

    micro-batch of 6 samples   stage 0 on ranks 0, 1     stage 1 on rank 2
                               [0 1 2] [3 4 5]     ──►   [0 1 2 3 4 5]        activations
                               [0 1 2] [3 4 5]     ◄──   [0 1 2 3 4 5]        their gradients

Every micro-batch is split over a stage's replicas in contiguous slices, in order. At a boundary every rank sends to
each rank of the other stage the rows that both hold.
"""

import itertools
from collections import deque
from collections.abc import Sequence

import torch

from megatron_dynapipe.plan.instructions import Channel, Instruction, RecvStart, SendStart
from megatron_dynapipe.runtime.transfer import JoinedWork, Transport, Work


def slices(rows: int, replicas: int) -> list[range]:
    """The rows of every replica, in order: equal, the first ones having one more where they do not divide."""
    ends = [0, *itertools.accumulate(rows // replicas + (at < rows % replicas) for at in range(replicas))]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def shared_rows(mine: range, theirs: Sequence[range]) -> list[tuple[int, slice]]:
    """(which of theirs, the rows that it shares with mine, counted from my first) wherever there are any."""
    found = []
    for at, other in enumerate(theirs):
        first, end = max(mine.start, other.start), min(mine.stop, other.stop)
        if first < end:
            found.append((at, slice(first - mine.start, end - mine.start)))
    return found


class SlicedTransport:
    """Sends and receives this rank's slice of each message in pieces, one for each rank that shares rows with it.

    Args:
        transport: carries the pieces; it addresses ranks by their global number where others address stages.
        stages: global ranks of every stage.
        rank: of this process.
    """

    def __init__(self, transport: Transport, stages: Sequence[Sequence[int]], *, rank: int) -> None:
        self._transport = transport
        self._stages = stages
        mine = next(ranks for ranks in stages if rank in ranks)
        self._replica, self._replicas = list(mine).index(rank), len(mine)
        self._rows: deque[int] = deque()

    def expect(self, instructions: Sequence[Instruction], rows: Sequence[int]) -> None:
        """Take note of the list that runs next: its transfers start in its order, and a message does not say its rows.

        Args:
            instructions: of this rank.
            rows: of every micro-batch, over all replicas of a stage.
        """
        transfers = (each for each in instructions if isinstance(each, SendStart | RecvStart))
        self._rows = deque(rows[transfer.micro_batch] for transfer in transfers)

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending this rank's slice; see `Transport`."""
        pieces = self._pieces(stage)
        return JoinedWork([self._transport.start_send(channel, to, [t[part] for t in tensors]) for to, part in pieces])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving this rank's slice, every piece in its place; see `Transport`."""
        pieces = self._pieces(stage)
        return JoinedWork([self._transport.start_recv(channel, of, [t[part] for t in tensors]) for of, part in pieces])

    def _pieces(self, stage: int) -> list[tuple[int, slice]]:
        """Ranks of another stage, and which of this rank's rows each of them holds of the next message."""
        rows, ranks = self._rows.popleft(), self._stages[stage]
        mine = slices(rows, self._replicas)[self._replica]
        return [(ranks[at], part) for at, part in shared_rows(mine, slices(rows, len(ranks)))]
