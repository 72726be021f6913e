"""Transports over torch.distributed: between devices, or through host memory.

A message is one transfer, whatever tensors it holds (`runtime.messages`).

Every channel (`core.instructions.Channel`) has a process group over the whole pipeline. Within a channel transfers
match in the order in which both ends start them. Every wait has the transport's deadline.
"""

import datetime
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_dynapipe.core.instructions import Channel
from megatron_dynapipe.runtime.messages import joined, landing
from megatron_dynapipe.runtime.transport import JoinedWork, Transport, Work


class TorchTransport:
    """`isend`/`irecv` of torch.distributed: gloo on the host, NCCL between devices.

    Args:
        groups: one process group per channel, each over all ranks of the pipeline.
        ranks: global rank of every stage of this pipeline.
        deadline_s: gloo's waits raise after this long. An NCCL wait only makes the device's stream wait, so there
            the deadline is that of the groups, enforced by NCCL's own watchdog.
    """

    def __init__(self, groups: Mapping[Channel, dist.ProcessGroup], ranks: Sequence[int], *, deadline_s: float) -> None:
        # By channel, its group and every stage's place in it: asking torch for them at each message takes its time.
        self._groups = {
            channel: (group, [dist.get_group_rank(group, rank) for rank in ranks]) for channel, group in groups.items()
        }
        self._deadline = datetime.timedelta(seconds=deadline_s)

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending; see `Transport`."""
        group, places = self._groups[channel]
        message = joined(tensors)
        work = self._work(dist.isend(message, group=group, group_dst=places[stage]), message)
        return JoinedWork([work], keep=[message])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving; see `Transport`."""
        group, places = self._groups[channel]
        message, unpack = landing(tensors)
        work = self._work(dist.irecv(message, group=group, group_src=places[stage]), message)
        return JoinedWork([work], keep=[message], then=unpack)

    def _work(self, work: dist.Work | None, message: torch.Tensor) -> Work:
        return _TorchWork(work, None if message.is_cuda else self._deadline)


class _TorchWork:
    """One of torch's works, with the deadline of its wait; none for NCCL's."""

    def __init__(self, work: dist.Work | None, deadline: datetime.timedelta | None) -> None:
        assert work is not None, "this rank is in the group of the channel"
        self._work = work
        self._deadline = deadline

    def wait(self) -> None:
        if self._deadline is None:
            self._work.wait()
        else:
            self._work.wait(self._deadline)


class HostStagedTransport:
    """Transfers between devices through host memory, for ranks that NCCL cannot connect: several on one GPU.

    What is sent is copied to (pinned) host memory, and what has been received from there to the device.

    A send waits, on the host, until the device has made the tensors and copied them; so the host does not run ahead of
    the device here. A receive's copy to the device runs on the current stream, which the passes that read it follow.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Copy to the host and start sending; see `Transport`."""
        message = joined(tensors)
        copy = _host_tensor(message)
        copy.copy_(message, non_blocking=True)
        if message.is_cuda:
            torch.cuda.current_stream(message.device).synchronize()
        return self._transport.start_send(channel, stage, [copy])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving on the host; see `Transport`."""
        message, unpack = landing(tensors)
        copy = _host_tensor(message)

        def to_device() -> None:
            # PyTorch's allocator of pinned memory keeps a copy's memory until the device has read it.
            message.copy_(copy, non_blocking=True)
            if unpack is not None:
                unpack()

        return JoinedWork([self._transport.start_recv(channel, stage, [copy])], then=to_device)


def _host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
