"""Recording a run: whatever fails, training and its exit status are those of a run without records."""

import numpy as np
import pytest

from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.supply import recorder as module
from megatron_dynapipe.megatron.supply.recorder import Recorder
from megatron_dynapipe.report.records import IterationRecord, RunRecord, StageRecord, TimelineRecord, read_records
from megatron_dynapipe.runtime.memory import MemoryCounts
from megatron_dynapipe.store.entry import StageEntry
from tests.helpers.plans import make_plan


class FakeTrace:
    """The planned times as those measured."""

    def __init__(self, entry: StageEntry) -> None:
        self._entry = entry

    def events(self):
        return self._entry.stage_plan.predicted

    def moment(self):
        return lambda: self.events()[-1].end_ns


def recorder(folder, store, *, rank: int = 0, world_size: int = 1, **more) -> Recorder:
    run = RunRecord(world_size=world_size, stages=2, memory_limit_bytes=1000, model_state_bytes=(), maximum=Shape(1, 8))

    def collect(data: bytes) -> list[bytes]:  # rank 0 is the last to call it
        store[rank] = data
        return [store[other] for other in sorted(store)] if rank == 0 else []

    run, collect = more.pop("run", run), more.pop("collect", collect)
    return Recorder(folder, run, collect, rank=rank, **{"write_metrics": lambda *_: None} | more)


def run(*recorders: Recorder, iterations: int = 4) -> str | None:
    """A run of two stages; what rank 0 says at its end."""
    plan = make_plan((3,), 2)
    for _ in range(iterations):
        for rank, each in enumerate(recorders):
            entry = StageEntry.of(plan, 0, rank, plan_digest="d")
            each.add(PlannedIteration(entry=entry, micro_batches=()), FakeTrace(entry))
    for each in recorders[1:]:
        each.report()
    return recorders[0].report()


@pytest.fixture
def store():
    return {}


@pytest.mark.parametrize("name", ["write", "mkdir", "collect", "run_guarded"])
def test_what_fails_is_told_once_and_changes_nothing(store, tmp_path, monkeypatch, capsys, name) -> None:
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    folder = tmp_path / "report"
    ranks = [recorder(folder, store, rank=rank, world_size=2) for rank in range(2)]
    if name == "mkdir":
        folder.write_bytes(b"a file where the folder should be")
    elif name == "write":
        monkeypatch.setattr("megatron_dynapipe.report.records.RecordFile._write", fail)
    elif name == "collect":
        for rank in ranks:
            monkeypatch.setattr(rank, "_collect", fail)
    else:
        monkeypatch.setattr(module, name, fail)
    assert (run(*ranks) is None) is (name != "collect"), "rank 0 still has its own records"
    said = capsys.readouterr().err
    assert said.count("warning: rank 0 cannot ") == 1 and "goes on without" in said
    assert said.count("warning: rank 1 cannot ") <= 1


def test_a_report_that_cannot_be_made_says_why(store, tmp_path, capsys) -> None:
    ranks = [recorder(tmp_path, store, rank=0, world_size=2), recorder(tmp_path / "other", store, rank=1, world_size=2)]
    store[1] = b"{}\n"
    ranks[1].report = lambda: None  # type: ignore[method-assign]
    assert run(*ranks) is None
    assert "warning: rank 0 cannot sum up the records of all ranks" in (said := capsys.readouterr().err)
    assert "rank-1.jsonl" in said


def test_numbers_that_are_none_do_not_end_a_run(store, tmp_path, capsys) -> None:
    run(recorder(tmp_path, store, world_size=1, write_metrics=lambda *_: np.array([]).max()))
    assert capsys.readouterr().err.count("warning") == 1


def test_memory_is_recorded_and_retries_are_said(store, tmp_path, capsys) -> None:
    retries = iter([0, 2, 2, 3])

    def memory() -> MemoryCounts:
        return MemoryCounts(allocated_bytes=1, reserved_bytes=3, retries=next(retries))

    run(recorder(tmp_path, store, memory=memory))
    records = [each for each in read_records(tmp_path / "rank-0.jsonl") if isinstance(each, IterationRecord)]
    assert [(each.allocated_bytes, each.reserved_bytes, each.allocator_retries) for each in records] == [
        (1, 3, 0), (1, 3, 2), (1, 3, 2), (1, 3, 3),
    ]  # fmt: skip
    said = [line for line in capsys.readouterr().err.splitlines() if "allocator" in line]
    assert len(said) == 2
    assert "given its cache back 2 times" in said[0] and "given its cache back 3 times" in said[1]


def test_every_stage_records_its_times_and_some_timelines(store, tmp_path) -> None:
    common = RunRecord(world_size=2, stages=2, memory_limit_bytes=9, model_state_bytes=(), maximum=Shape(1, 64))
    run(*(recorder(tmp_path, store, rank=rank, world_size=2, run=common) for rank in range(2)))
    for rank in range(2):
        records = read_records(tmp_path / f"rank-{rank}.jsonl")
        assert [each for each in records if isinstance(each, RunRecord)] == ([common] if rank == 0 else [])
        assert [each.stage for each in records if isinstance(each, StageRecord)] == [rank] * 4
        assert {each.stage for each in records if isinstance(each, TimelineRecord)} == {rank}


@pytest.mark.parametrize("reserves_all", [False, True])
def test_a_run_ends_with_every_ranks_peaks_unless_memory_was_reserved(store, tmp_path, reserves_all) -> None:
    counts = [(10, 30), (20, 40), (5, 40), (8, 35)]  # tensors, held: peaks of different iterations
    recorders = []
    for rank in range(2):
        each = iter(counts if rank else [(100, 101)] * 4)

        def memory(each=each) -> MemoryCounts:
            allocated, reserved = next(each)
            return MemoryCounts(allocated_bytes=allocated * 10**6, reserved_bytes=reserved * 10**6, retries=1)

        more = {"memory": memory, "reserves_all": reserves_all}
        recorders.append(recorder(tmp_path, store, rank=rank, world_size=2, **more))
    summary = run(*recorders)
    held = "memory: rank 1's allocator held up to 40 MB for tensors of up to 20 MB"
    assert (held in summary) is not reserves_all and ("memory: " in summary) is not reserves_all
