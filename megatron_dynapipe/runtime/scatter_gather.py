"""Messages sharded over the tensor-parallel ranks of a stage, which hold equal tensors (scatter–gather).

    sending ranks    [a b c d]  [a b c d]      rank 0 sends a b, rank 1 sends c d
    receiving ranks  [a b · ·]  [· · c d]      each receives its peer's shard in place …
                     [a b c d]  [a b c d]      … and all-gathers the others

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021), section
4.1. What arrives is bitwise what was sent.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_dynapipe.core.instructions import Channel
from megatron_dynapipe.runtime.messages import joined, landing
from megatron_dynapipe.runtime.transport import JoinedWork, Transport, Work

IsSharded = Callable[[int, int], bool]
"""Whether a message is sharded, from its boundary (the stage upstream of it) and its total bytes."""


class ScatterGatherTransport:
    """Sends this rank's shard of each message that is sharded, and all-gathers what it receives.

    Every tensor-parallel rank of a stage executes the same instruction list, so all of them gather in the same order.
    A gather runs when a receive is waited for. On CUDA neither blocks the host: the current stream waits for the
    shard, then for the gather.

    Args:
        transport: carries the shards.
        group: the stage's tensor-parallel ranks; a group of its own, so that gathers match no other collective.
        stage: this rank's.
        is_sharded: gives the same answer on both ends of every boundary.
    """

    def __init__(self, transport: Transport, group: dist.ProcessGroup, *, stage: int, is_sharded: IsSharded) -> None:
        self._transport = transport
        self._group = group
        self._stage = stage
        self._is_sharded = is_sharded
        self._rank = group.rank()
        self._size = group.size()

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending, the whole or this rank's shard; see `Transport`."""
        if not self._shards(channel, self._stage, stage, tensors):
            return self._transport.start_send(channel, stage, tensors)
        shard = self._shard(_bytes_of(joined(tensors)))
        return JoinedWork([self._transport.start_send(channel, stage, [shard])], keep=[shard])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving, the whole or this rank's shard of it; see `Transport`."""
        if not self._shards(channel, stage, self._stage, tensors):
            return self._transport.start_recv(channel, stage, tensors)
        message, unpack = landing(tensors)
        whole = _Gather(_bytes_of(message), self._rank, self._size)
        work = self._transport.start_recv(channel, stage, [whole.shard])

        def gather() -> None:
            whole.run(self._group)
            if unpack is not None:
                unpack()

        return JoinedWork([work], then=gather)

    def _shards(self, channel: Channel, source: int, destination: int, tensors: Sequence[torch.Tensor]) -> bool:
        boundary = source if channel.downstream else destination
        return self._is_sharded(boundary, sum(tensor.nbytes for tensor in tensors))

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """The bytes of a message that this rank sends: a view, unless the last shard must be padded."""
        size = _shard_bytes(whole.numel(), self._size)
        part = whole[self._rank * size : (self._rank + 1) * size]
        if part.numel() == size:
            return part
        return torch.nn.functional.pad(part, (0, size - part.numel()))


class _Gather:
    """Where a message's shards are gathered: in the message itself if they divide it evenly."""

    def __init__(self, whole: torch.Tensor, rank: int, ranks: int) -> None:
        size = _shard_bytes(whole.numel(), ranks)
        self._whole = whole
        self._gathered = whole if size * ranks == whole.numel() else whole.new_empty(size * ranks)
        self.shard = self._gathered[rank * size : (rank + 1) * size]

    def run(self, group: dist.ProcessGroup) -> None:
        dist.all_gather_into_tensor(self._gathered, self.shard, group=group)
        if self._gathered is not self._whole:
            self._whole.copy_(self._gathered[: self._whole.numel()])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, in place: one code path for every type, and none computes with the values."""
    return tensor.detach().view(-1).view(torch.uint8)


def _shard_bytes(whole_bytes: int, ranks: int) -> int:
    return -(-whole_bytes // ranks)
