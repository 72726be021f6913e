"""Counts and reservations of a GPU's memory, on stubs of `torch.cuda`."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.runtime import memory
from megatron_dynapipe.runtime.memory import MemoryCounts, memory_counts, reserve

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")


def test_counts_are_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 30, "reserved_bytes.all.peak": 50, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats if device == GPU else {})
    assert memory_counts(GPU) == MemoryCounts(allocated_bytes=30, reserved_bytes=50, retries=2)
    assert memory_counts(CPU) is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of which 400 bytes are reserved, that gives up to 900 more."""
    state = SimpleNamespace(asked=[])

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        state.asked.append((size, dtype, device))
        if size > 900:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 400)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 2000))
    monkeypatch.setattr(memory.torch, "empty", empty)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return state


def test_what_is_missing_is_reserved_at_once(gpu: SimpleNamespace) -> None:
    assert reserve(1000, GPU) == 600
    assert gpu.asked == [(600, torch.uint8, GPU)]


@pytest.mark.parametrize(("limit", "device"), [(400, GPU), (300, GPU), (1000, CPU)])
def test_nothing_is_reserved_where_nothing_is_missing(gpu: SimpleNamespace, limit: int, device: torch.device) -> None:
    assert reserve(limit, device) == 0 and gpu.asked == []


def test_too_little_memory_and_segments_that_do_not_grow_are_refused(gpu, monkeypatch):
    with pytest.raises(ConfigError, match=r"expected 0\.002 MB of free device memory to reserve, found 0\.001 MB"):
        reserve(2000, GPU)
    gpu.asked.clear()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with pytest.raises(ConfigError, match="whose segments grow"):
        reserve(1000, GPU)
    assert gpu.asked == []


def test_peaks_of_two_counts_are_the_higher_ones() -> None:
    first = MemoryCounts(allocated_bytes=5, reserved_bytes=9, retries=0)
    second = MemoryCounts(allocated_bytes=7, reserved_bytes=8, retries=1)
    assert first.with_peaks_of(second) == MemoryCounts(allocated_bytes=7, reserved_bytes=9, retries=1)
