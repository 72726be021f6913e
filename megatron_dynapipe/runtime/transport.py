"""The port by which tensors pass between neighbouring stages. Both know all shapes, so no handshake is needed.

`TorchTransport` and `HostStagedTransport` (`runtime.torch_transport`) move tensors, `ScatterGatherTransport`
(`runtime.scatter_gather`) shards what another one moves. Here is what none of them is needed for.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_dynapipe.core.instructions import Channel


class Work(Protocol):
    """A transfer that has been started."""

    def wait(self) -> None:
        """Return when the tensors may be read (received) or dropped (sent); raises when the deadline has passed."""
        ...


class Transport(Protocol):
    """Starts transfers to and from the other stages of this rank's pipeline."""

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending to `stage`; the tensors must live until the work is done."""
        ...

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving from `stage` into `tensors`."""
        ...


class JoinedWork:
    """Transfers as one, which holds what must live until they are done.

    Args:
        works: waited for in turn.
        keep: tensors that are being sent or received.
        then: called once all are done.
    """

    def __init__(
        self, works: Sequence[Work], *, keep: Sequence[torch.Tensor] = (), then: Callable[[], None] | None = None
    ) -> None:
        self._works = works
        self._keep = keep
        self._then = then

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()


class NoTransport:
    """Sends nothing, and receives zeros."""

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Nothing is sent; see `Transport`."""
        return JoinedWork([])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Zeros have arrived; see `Transport`."""
        for tensor in tensors:
            tensor.zero_()
        return JoinedWork([])


class GatedTransport:
    """A transport whose first transfer of a step waits for the ranks' agreement on it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._gate: Callable[[], None] | None = None

    def wait_for(self, gate: Callable[[], None] | None) -> None:
        """Call `gate` before the next transfer, once; it raises where the step cannot run."""
        self._gate = gate

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending; see `Transport`."""
        self._pass()
        return self._transport.start_send(channel, stage, tensors)

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving; see `Transport`."""
        self._pass()
        return self._transport.start_recv(channel, stage, tensors)

    def _pass(self) -> None:
        if self._gate is not None:
            gate = self._gate
            self._gate = None
            gate()
