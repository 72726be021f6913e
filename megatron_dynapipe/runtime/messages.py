"""A message's tensors as one stretch of memory, because every tensor that is sent by itself is a kernel of its own.

    encoder output [s, b, h] ┐
    decoder state  [t, b, h] ┘  ──►  |········|·|·····|    one buffer, each tensor at a multiple of ALIGNMENT bytes

With one hardware queue the second kernel of a message would wait for the first to be received, and everything behind
it on the device with it. Sender and receiver lay a message out alike, from its tensors' shapes and types.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch

ALIGNMENT = 16
"""Bytes, of the widest loads that kernels have."""


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of tensors of these bytes in their message, and its bytes."""
    starts = []
    end = 0
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


class MessageBuffers:
    """A pool of equal buffers that messages are received into or sent from, as many as a list holds at once.

    PyTorch records an unbatched transfer on its tensors, so that memory of a freed tensor is not used again before the
    device has passed the transfer; a host that runs ahead of the device would hold more than the plan counts. A buffer
    is used again once nothing refers to it but its pool: what comes next on any stream follows, on the device, what has
    used it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0
        self._buffers: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Buffers that the list has needed so far."""
        return len(self._buffers)

    def begin(self, size: int) -> None:
        """Give all buffers back: a list begins whose largest message is of so many bytes."""
        self._bytes = size
        self._buffers.clear()

    def take(self) -> torch.Tensor:
        """A buffer uint8[bytes of the list's largest message] that nothing else refers to."""
        for buffer in self._buffers:
            if _references(buffer) == _IDLE:
                return buffer
        self._buffers.append(torch.empty(self._bytes, dtype=torch.uint8, device=self._device))
        return self._buffers[-1]


def _references(tensor: torch.Tensor) -> int:
    """The number of references to a tensor's memory: tensors, and graphs that keep them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_IDLE = _references(torch.empty(1, dtype=torch.uint8))


def together(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A message's tensors lying as one: copies, which need the given ones no longer, unless they do already."""
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
    """The contiguous tensor in which a message arrives, and what brings it to its tensors then; None if it is there."""
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
    storage = tensors[0].untyped_storage()
    first = _start(tensors[0])
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
    shapes = [tensor.shape for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    buffer = torch.empty(message_bytes(shapes, dtypes), dtype=torch.uint8, device=tensors[0].device)
    return buffer, views(buffer, shapes, dtypes)


def _bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[int]:
    return [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]


def _start(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()
