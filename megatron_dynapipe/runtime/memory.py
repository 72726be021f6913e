"""What a forward keeps and what both passes need at most: by hooks on the CPU, by the allocator on CUDA devices."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        bytes: alive now.
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
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in given:
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
