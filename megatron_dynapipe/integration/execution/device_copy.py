"""A micro-batch's host tensors on the device, in one copy.

    labels | tokens | offsets | loss mask      →      one pinned buffer      →      views of one device buffer

Through pinned memory, since a copy from any other waits for the device's work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_to(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors on the device, in the order given; None stays None, and on a CPU so does everything."""
    if device.type == "cpu":
        return list(tensors)
    return copy_buffer(device, tensors) or copy_together(device, tensors)


def copy_buffer(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """As `copy_to`, of tensors that lie in one buffer (`data.pinning`), which is copied; None if they do not."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    if len(storages) != 1:
        return None
    storage = next(tensor for tensor in tensors if tensor is not None).untyped_storage()
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, non_blocking=True, copy=True)
    return [None if tensor is None else _same_view(tensor, buffer) for tensor in tensors]


def _same_view(tensor: Tensor, buffer: Tensor) -> Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    return buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


def copy_together(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """As `copy_to`, by one copy whatever the device. Elements lie at multiples of their own size: the widest first."""
    given = sorted(
        ((index, tensor) for index, tensor in enumerate(tensors) if tensor is not None),
        key=lambda pair: -pair[1].element_size(),
    )
    moved: list[Tensor | None] = [None] * len(tensors)
    if not given:
        return moved
    buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in given])
    buffer = buffer.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else buffer.to(device)
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in given]
    for (index, tensor), part in zip(given, buffer.split(sizes), strict=True):
        moved[index] = part.view(tensor.dtype).view(tensor.shape)
    return moved
