"""Memory: what passes take, what PyTorch's allocator holds of a GPU, and reserving what plans may use at once."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_dynapipe.core.errors import ConfigError, ExecutionError
from megatron_dynapipe.core.units import in_mb

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes above what was there before a forward.

    Attributes:
        stored_bytes: kept at the forward's end for the backward.
        peak_bytes: high-water mark of forward and backward. In a stage of several layers the last one's is reached
            above what those before it keep, whichever of the two passes reaches it.
    """

    stored_bytes: int
    peak_bytes: int


def pass_memory(forward: Callable[[], Any], backward: Callable[[Any], None], device: torch.device) -> PassMemory:
    """Run a forward and its backward once, and say what memory they took."""
    return _on_cuda(forward, backward, device) if device.type == "cuda" else _on_cpu(forward, backward)


def _on_cuda(forward: Callable[[], Any], backward: Callable[[Any], None], device: torch.device) -> PassMemory:
    backward(forward())  # lets go of the inputs before these, and allocates what libraries keep
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    output = forward()
    stored = torch.cuda.memory_allocated(device) - before
    backward(output)
    torch.cuda.synchronize(device)
    return PassMemory(stored_bytes=stored, peak_bytes=torch.cuda.max_memory_allocated(device) - before)


def _on_cpu(forward: Callable[[], Any], backward: Callable[[Any], None]) -> PassMemory:
    with LiveStorages() as live:
        output = forward()
        stored = live.bytes
        backward(output)
    return PassMemory(stored_bytes=stored, peak_bytes=live.peak_bytes)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operations inside the block make, for as long as each is alive.

    What is alive at a forward's end is its output and what autograd saved for the backward. Storages that existed
    before (parameters, inputs, masks) do not count; a view is its base's storage.

    Attributes:
        peak_bytes: the most that were alive at once, between operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; take note of storages that it made."""
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in inputs:
                self._note(leaf.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self.bytes -= size

        self._known[key] = weakref.ref(storage, died)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """The allocator's counts so far.

    Attributes:
        allocated_bytes: bytes of tensors, at their peak since peaks were last reset.
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
        needed, there = in_mb(missing, free)
        raise ConfigError(
            f"expected {needed} of free device memory to reserve, found {there}",
            hint="lower --dynapipe-device-memory-limit, or end what else uses the device",
        ) from None
    return missing


@contextlib.contextmanager
def counted_on(limit_bytes: int) -> Iterator[None]:
    """Memory that runs out in the block is named next to the limit that plans were made with.

    Raises:
        ExecutionError: with the notes of PyTorch's error, which name the instruction.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        (planned,) = in_mb(limit_bytes)
        short = ExecutionError(
            f"the device is out of memory; plans may use {planned} of it: {str(error).splitlines()[0]}",
            hint="lower --dynapipe-device-memory-limit by what else holds memory there, or end it; the report compares"
            " what was planned with what was used",
        )
        for note in getattr(error, "__notes__", ()):
            short.add_note(note)
        raise short from error
