"""A micro-batch's tensors as views of one pinned buffer, made by the thread that reads ahead.

A copy to the device from other memory waits for the device's work, and pinning takes time of the host: here it is not
the training thread's.

    tokens | labels | loss mask | lengths      each begins at a multiple of 16 bytes
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dynapipe.data.collate import HostMicroBatch
from megatron_dynapipe.data.segments import RowSegments

ALIGNMENT = 16


def pinning(device: torch.device) -> Callable[[HostMicroBatch], HostMicroBatch]:
    """What the thread that reads ahead does to each micro-batch of a run on a device."""
    if device.type != "cuda":
        return lambda batch: batch

    def pinned(batch: HostMicroBatch) -> HostMicroBatch:
        torch.cuda.set_device(device)  # pinned memory belongs to a context: not to one that this would make on device 0
        return in_one_buffer(batch, pin=True)

    return pinned


def in_one_buffer(batch: HostMicroBatch, *, pin: bool) -> HostMicroBatch:
    """The same micro-batch with all its tensors in one buffer."""
    first, second = batch.input_segments, batch.decoder_segments
    rows = [part for row in (first, second) for part in ((row.offsets, row.positions) if row else (None, None))]
    fields = (batch.tokens, batch.decoder_tokens, batch.labels, batch.loss_mask, batch.decoder_lengths, batch.tasks)
    copied = gathered([batch.input_lengths, *fields, *rows], pin=pin)
    input_lengths, tokens, decoder_tokens, labels, loss_mask, decoder_lengths, tasks, *parts = copied
    assert input_lengths is not None, "every stage has it"
    return replace(
        batch,
        input_lengths=input_lengths,
        tokens=tokens,
        decoder_tokens=decoder_tokens,
        labels=labels,
        loss_mask=loss_mask,
        decoder_lengths=decoder_lengths,
        tasks=tasks,
        input_segments=_row(first, *parts[:2]),
        decoder_segments=_row(second, *parts[2:]),
    )


def _row(segments: RowSegments | None, offsets: Tensor | None, positions: Tensor | None) -> RowSegments | None:
    if segments is None or offsets is None or positions is None:
        return None
    return replace(segments, offsets=offsets, positions=positions)


def gathered(tensors: Sequence[Tensor | None], *, pin: bool) -> list[Tensor | None]:
    """Copies of tensors as views of one buffer; None stays None."""
    sizes = [0 if tensor is None else tensor.numel() * tensor.element_size() for tensor in tensors]
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    copied: list[Tensor | None] = []
    for tensor, place, size in zip(tensors, places, sizes, strict=True):
        if tensor is None:
            copied.append(None)
            continue
        view = buffer[place : place + size].view(tensor.dtype).view(tensor.shape)
        copied.append(view.copy_(tensor))
    return copied
