"""Transfers between devices through host memory, for ranks that NCCL cannot connect: several on one GPU."""

from collections.abc import Sequence

import torch

from megatron_dynapipe.plan.instructions import Channel
from megatron_dynapipe.runtime.transfer import Transport, Work


class HostStagedTransport:
    """Copies what is sent to (pinned) host memory, and what has been received from there to the device.

    A send waits, on the host, until the device has made the tensors and copied them; so the host does not run ahead of
    the device here. A receive's copy to the device runs on the current stream, which the passes that read it follow.

    Args:
        transport: carries tensors between hosts, as over gloo.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Copy to the host and start sending; see `Transport`."""
        copies = [_host_tensor(tensor) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if tensors and tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return _Sending(self._transport.start_send(channel, stage, copies), copies)

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving on the host; see `Transport`."""
        copies = [_host_tensor(tensor) for tensor in tensors]
        return _Receiving(self._transport.start_recv(channel, stage, copies), copies, tensors)


class _Sending:
    """A send of copies, which live until they are sent."""

    def __init__(self, work: Work, copies: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._copies = copies

    def wait(self) -> None:
        self._work.wait()


class _Receiving:
    """A receive into copies, and the tensors that they are copied to.

    PyTorch's allocator of pinned memory keeps a copy's memory until the device has read it, so nothing waits for that.
    """

    def __init__(self, work: Work, copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._copies = copies
        self._tensors = tensors

    def wait(self) -> None:
        self._work.wait()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy, non_blocking=True)


def _host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
