"""A message's tensors as one stretch of memory, because every tensor that is sent by itself is a kernel of its own.

    encoder output [s, b, h] ┐
    decoder state  [t, b, h] ┘  ──►  |········|·|·····|    one buffer, each tensor at a multiple of ALIGNMENT bytes

With one hardware queue the second kernel of a message would wait for the first to be received, and everything behind
it on the device with it. Sender and receiver lay a message out alike, from its tensors' shapes and types.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch

from megatron_dynapipe.plan.instructions import Payload

ALIGNMENT = 16
"""Bytes, of the widest loads that kernels have."""


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these bytes begin in their message, and its bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + size
    return starts, end


def message_bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of a message of tensors of these shapes and types."""
    return layout(_bytes(shapes, dtypes))[1]


def views(buffer: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """A message's tensors in a buffer uint8[at least its bytes].

    As `data`, each counts its own changes: a module that works in place on one must not spoil another for autograd.
    """
    sizes = _bytes(shapes, dtypes)
    starts, _ = layout(sizes)
    parts = zip(starts, sizes, shapes, dtypes, strict=True)
    return [buffer[start : start + size].view(dtype).view(tuple(shape)).data for start, size, shape, dtype in parts]


class ReceiveBuffers:
    """Buffers that messages are received into, for each kind of payload as many as are held at once, all equal.

    PyTorch records an unbatched transfer on its tensors, so that memory of a freed tensor is not used again before the
    device has passed the transfer; a host that runs ahead of the device would hold more than the plan counts. A buffer
    is used again once nothing refers to it but its pool: what comes next on any stream follows, on the device, what has
    read it.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most: dict[Payload, int] = {}
        self._buffers: dict[Payload, list[torch.Tensor]] = {payload: [] for payload in Payload}

    def expect(self, messages: Mapping[Payload, int]) -> None:
        """Take note of the largest message of a list that runs next, by payload; buffers far from it are given back."""
        for payload, size in messages.items():
            if not size <= self._most.get(payload, -1) <= size * _SPARE:
                self._most[payload] = size
                self._buffers[payload].clear()

    def take(self, payload: Payload) -> torch.Tensor:
        """A buffer uint8[bytes of the list's largest message] that nothing else refers to."""
        buffers = self._buffers[payload]
        for buffer in buffers:
            if _references(buffer) == _IDLE:
                return buffer
        buffers.append(torch.empty(self._most[payload], dtype=torch.uint8, device=self._device))
        return buffers[-1]

    def clear(self) -> None:
        """Give all back."""
        for buffers in self._buffers.values():
            buffers.clear()


_SPARE = 1.25
"""Buffers serve lists whose largest message is so much smaller."""


def _references(tensor: torch.Tensor) -> int:
    """What refers to a tensor's memory: tensors, and graphs that keep them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_IDLE = _references(torch.empty(1, dtype=torch.uint8))


def together(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A message's tensors lying as one: copies unless they do already, beside which those given need not be kept."""
    if not tensors or in_place(tensors) is not None:
        return tensors
    _, parts = _apart(tensors)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return parts


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A message that is sent, as one contiguous tensor: a copy unless its tensors lie so already."""
    whole = in_place(together(tensors))
    assert whole is not None
    return whole


def landing(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Where a message arrives as one contiguous tensor, and what brings it to its tensors then; None if it is there."""
    if (whole := in_place(tensors)) is not None:
        return whole, None
    buffer, parts = _apart(tensors)

    def unpack() -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.copy_(part)

    return buffer, unpack


def in_place(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one tensor of a message, or the uint8[bytes] that its tensors share; None where they do not lie as one."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    if len(tensors) == 1:
        return tensors[0]
    storage, first = tensors[0].untyped_storage(), _start(tensors[0])
    starts, size = layout(tensor.nbytes for tensor in tensors)
    if any(
        tensor.untyped_storage() is not storage or _start(tensor) != first + start
        for start, tensor in zip(starts, tensors, strict=True)
    ):
        return None
    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return whole.set_(storage, first, (size,), (1,))


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer for a message like this, and its tensors there; one tensor keeps its type."""
    if len(tensors) == 1:
        buffer = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        return buffer, [buffer]
    shapes, dtypes = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
    buffer = torch.empty(message_bytes(shapes, dtypes), dtype=torch.uint8, device=tensors[0].device)
    return buffer, views(buffer, shapes, dtypes)


def _bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[int]:
    return [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
