"""How often a part is run when it is measured, and by which clock."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.core.executor import Mark
from megatron_dynapipe.megatron.profiling import measure as module
from megatron_dynapipe.megatron.profiling.layers import Forward, MeasuredModule, Point
from megatron_dynapipe.megatron.profiling.measure import ThreadClock, clock_of, measure
from megatron_dynapipe.runtime.memory import PassMemory
from megatron_dynapipe.runtime.platform import CpuPlatform
from tests.helpers.processes import run_ranks

CPU = torch.device("cpu")
KEPT_BYTES = 2 * (2 * 64) * 32 * 4
"""Input and output of a product of 2 × 64 rows of 32 numbers."""


class Counted:
    """A product that says how often it was run, and how many results were kept at most."""

    def __init__(self, size: int) -> None:
        self.layer = torch.nn.Linear(size, size)
        self.forwards = self.kept = self.most = 0

    def part(self) -> MeasuredModule:
        return MeasuredModule(name="encoder", module=self.layer, prepare=self.prepare)

    def prepare(self, point: Point) -> Forward:
        def forward() -> torch.Tensor:
            self.forwards += 1
            self.kept += 1
            self.most = max(self.most, self.kept)
            output = self.layer(torch.ones(point[0] * point[1], self.layer.in_features))
            output.register_hook(self.back)
            return output

        return forward

    def back(self, gradient: torch.Tensor) -> None:
        self.kept -= 1


@pytest.mark.parametrize(
    ("budget_bytes", "in_flight"),
    [
        pytest.param(10**9, module.MOST_IN_FLIGHT, id="small passes: as many as are allowed"),
        pytest.param(3 * KEPT_BYTES + 1, 3, id="as many as lie beyond the caches"),
        pytest.param(1, 1, id="one that does so by itself"),
    ],
)
def test_passes_are_measured_with_others_in_flight(budget_bytes, in_flight, monkeypatch):
    monkeypatch.setattr(module, "BEYOND_CACHES_BYTES", budget_bytes)
    monkeypatch.setattr(module, "_fewest_of_ranks", lambda count: count)
    counted = Counted(32)
    sample = measure(counted.part(), (2, 64), ThreadClock(), shared=True)
    assert sample.stored_bytes == KEPT_BYTES
    assert counted.most == in_flight
    # Once for memory, then as many as are in flight before the repeats, whatever the clock says.
    assert counted.forwards == 1 + in_flight - 1 + module.SHARED_REPEATS
    assert sample.forward_ns > 0 and sample.backward_ns > 0


def unequal(rank: int, world_size: int) -> int:
    """How often a rank runs a shared part forward of which it keeps more than the other."""
    dist.init_process_group("gloo")
    module.BEYOND_CACHES_BYTES = 4 * KEPT_BYTES + 1
    counted = Counted(32 * (rank + 1))

    def prepare(point: Point) -> Forward:
        forward = counted.prepare(point)

        def together() -> torch.Tensor:
            dist.all_reduce(torch.zeros(1))
            return forward()

        return together

    measure(replace(counted.part(), prepare=prepare), (2, 64), ThreadClock(), shared=True)
    dist.barrier()
    return counted.forwards


def test_ranks_that_keep_different_bytes_run_a_shared_part_equally_often() -> None:
    """A head's ranks keep what their own labels take; a profile of two tensor-parallel ranks never ended."""
    assert len(set(run_ranks(unequal, 2, deadline_s=120))) == 1


def test_ranks_that_share_a_layer_wait_for_one_another() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert isinstance(clock_of(CPU, shared=False), ThreadClock)
        assert type(clock_of(CPU, shared=True)) is CpuPlatform
    finally:
        torch.set_num_threads(threads)


class RecordedGpu(CpuPlatform):
    """A CPU that calls itself a GPU, whose clock ticks once a mark, and which says when it was waited for."""

    device = torch.device("cuda")

    def __init__(self, counted: Counted) -> None:
        self.counted, self.ticks, self.waits = counted, 0, []

    def mark(self) -> Mark:
        self.ticks += 12
        now = self.ticks
        return lambda: now

    def synchronize(self) -> None:
        self.waits.append(self.counted.forwards)


def test_passes_on_a_gpu_are_launched_one_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(32)
    monkeypatch.setattr(module, "pass_memory", lambda *given: PassMemory(stored_bytes=40, peak_bytes=70))
    platform = RecordedGpu(counted)
    sample = measure(replace(counted.part(), layers=4), (2, 64), platform, shared=True)
    warm = module.SHARED_WARM
    assert platform.waits == [*range(1, warm + 1), warm + module.SHARED_REPEATS], "one wait after all timed passes"
    assert counted.most == 1, "nothing beyond a pass needs room on a GPU"
    assert (sample.forward_ns, sample.backward_ns) == (3, 3), "a tick of 12 over 4 layers"
    assert (sample.stored_bytes, sample.peak_bytes) == (10, 40), "above what the three layers before keep"
