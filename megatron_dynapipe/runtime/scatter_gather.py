"""Messages divided over the tensor-parallel ranks of a stage, which hold equal tensors (scatter–gather).

    sending ranks    [a b c d]  [a b c d]      rank 0 sends a b, rank 1 sends c d
    receiving ranks  [a b · ·]  [· · c d]      each gets its peer's share at its own place …
                     [a b c d]  [a b c d]      … and all gather the rest from one another

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC 2021), section
4.1. What arrives is what was sent, bit by bit.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_dynapipe.plan.instructions import Channel
from megatron_dynapipe.runtime.transfer import Transport, Work

Divides = Callable[[int, int], bool]
"""Whether a message crosses divided: its boundary (the stage upstream of it), and its bytes in all."""


class ScatterGatherTransport:
    """Sends this rank's share of each message that is to be divided, and gathers the rest of what it receives.

    Every tensor-parallel rank of a stage executes the same instruction list, so all of them gather in the same order.
    A gather runs when a receive is waited for. On CUDA neither holds up the host: the current stream waits for the
    share, then for the gather.

    Args:
        transport: carries the shares.
        group: the stage's tensor-parallel ranks; a group of its own, so that gathers match no other collective.
        stage: of this rank.
        divides: the same answers on both ends of every boundary.
    """

    def __init__(self, transport: Transport, group: dist.ProcessGroup, *, stage: int, divides: Divides) -> None:
        self._transport = transport
        self._group = group
        self._stage = stage
        self._divides = divides
        self._rank, self._size = group.rank(), group.size()

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending, the whole or this rank's share; see `Transport`."""
        if not self._is_divided(channel, self._stage, stage, tensors):
            return self._transport.start_send(channel, stage, tensors)
        shares = [self._share(_bytes_of(tensor)) for tensor in tensors]
        return _Sending(self._transport.start_send(channel, stage, shares), shares)

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving, the whole or this rank's share of it; see `Transport`."""
        if not self._is_divided(channel, stage, self._stage, tensors):
            return self._transport.start_recv(channel, stage, tensors)
        gathers = [_Gather(_bytes_of(tensor), self._rank, self._size) for tensor in tensors]
        work = self._transport.start_recv(channel, stage, [gather.share for gather in gathers])
        return _Receiving(work, gathers, self._group)

    def _is_divided(self, channel: Channel, source: int, destination: int, tensors: Sequence[torch.Tensor]) -> bool:
        boundary = source if channel.downstream else destination
        return self._divides(boundary, sum(tensor.nbytes for tensor in tensors))

    def _share(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor's bytes that this rank sends: a view, but for an end that must be filled up."""
        size = _share_bytes(whole.numel(), self._size)
        part = whole[self._rank * size : (self._rank + 1) * size]
        if part.numel() == size:
            return part
        return torch.nn.functional.pad(part, (0, size - part.numel()))


class _Gather:
    """Where a tensor's shares come together: in the tensor itself if they are equal parts of it."""

    def __init__(self, whole: torch.Tensor, rank: int, ranks: int) -> None:
        size = _share_bytes(whole.numel(), ranks)
        self._whole = whole
        self._gathered = whole if size * ranks == whole.numel() else whole.new_empty(size * ranks)
        self.share = self._gathered[rank * size : (rank + 1) * size]

    def run(self, group: dist.ProcessGroup) -> None:
        dist.all_gather_into_tensor(self._gathered, self.share, group=group)
        if self._gathered is not self._whole:
            self._whole.copy_(self._gathered[: self._whole.numel()])


class _Sending:
    """Shares under way; those that are copies live until they have been sent."""

    def __init__(self, work: Work, shares: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._shares = shares

    def wait(self) -> None:
        self._work.wait()


class _Receiving:
    """Shares under way, to be gathered."""

    def __init__(self, work: Work, gathers: Sequence[_Gather], group: dist.ProcessGroup) -> None:
        self._work = work
        self._gathers = gathers
        self._group = group

    def wait(self) -> None:
        self._work.wait()
        for gather in self._gathers:
            gather.run(self._group)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, in place: one code path for every type, and none computes with the values."""
    return tensor.detach().view(-1).view(torch.uint8)


def _share_bytes(whole_bytes: int, ranks: int) -> int:
    return -(-whole_bytes // ranks)
