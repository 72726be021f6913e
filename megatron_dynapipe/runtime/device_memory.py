"""What PyTorch's allocator holds of a GPU, and taking all that plans may use at once, before the first list."""

import os
from dataclasses import dataclass

import torch

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import in_mb

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """What the allocator has counted so far.

    Attributes:
        allocated_bytes: of tensors, at their peak since peaks were last reset.
        reserved_bytes: held of the device, likewise; what is above the tensors' is fragments, and free for later.
        retries: times that it gave its cache back to the device to find room, which waits for the device.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int

    def with_peaks_of(self, other: "MemoryCounts") -> "MemoryCounts":
        """The higher peaks of both, and the later count of retries."""
        return MemoryCounts(
            allocated_bytes=max(self.allocated_bytes, other.allocated_bytes),
            reserved_bytes=max(self.reserved_bytes, other.reserved_bytes),
            retries=max(self.retries, other.retries),
        )


def memory_counts(device: torch.device) -> MemoryCounts | None:
    """The allocator's counts, without a wait for the device; None on a CPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return MemoryCounts(
        allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
        retries=stats.get("num_alloc_retries", 0),
    )


def tensor_room_bytes(device: torch.device, peaks: MemoryCounts) -> int | None:
    """How much of a GPU tensors can have at a time, by the allocator's peaks of a whole run; None on a CPU.

    What it took beyond its tensors' peak is fragments that fit no new tensor, and what neither it nor the device has
    is held by others: the context, NCCL's and libraries' buffers, other processes.

        total  ├──────────── tensors ────────────┤ fragments ├ held by others ┤
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    others = max(total - free - torch.cuda.memory_reserved(device), 0)
    return total - others - max(peaks.reserved_bytes - peaks.allocated_bytes, 0)


def reserve(limit_bytes: int, device: torch.device) -> int:
    """Let the allocator hold so much of a GPU from now on; the bytes that it took for it.

    One allocation of what is missing, freed at once: with segments that grow, its pages stay in the allocator's cache,
    and later tensors of any size are laid into them. Nothing happens on a CPU.

    Raises:
        ConfigError: segments do not grow, so that the reservation would serve tensors of its own size alone; or the
            device has less memory.
    """
    if device.type != "cuda":
        return 0
    if not any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR):
        raise ConfigError(
            "--dynapipe-reserve-all-memory needs an allocator whose segments grow, got another configuration",
            hint=f"add expandable_segments:True to {ALLOCATOR[0]}, or unset it: a run then sets it",
        )
    missing = limit_bytes - torch.cuda.memory_reserved(device)
    if missing <= 0:
        return 0
    try:
        torch.empty(missing, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info(device)
        wanted, there = in_mb(missing, free)
        raise ConfigError(
            f"expected {wanted} of free device memory to reserve, found {there}",
            hint="lower --dynapipe-device-memory-limit, or end what else uses the device",
        ) from None
    return missing
