"""A node's source of plans: what is late is made, after a wait that suits how long plans take."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from megatron_dynapipe.core.errors import PlannerFailedError, StoreError
from megatron_dynapipe.digests import file_digest
from megatron_dynapipe.service import PlanSource, source
from megatron_dynapipe.service.failure import describe_failure, publish_failure
from megatron_dynapipe.service.planned_splits import PlannedSplits, drawn_by
from megatron_dynapipe.store import PlanKeys, Store, new_job_name
from megatron_dynapipe.store.codec import decode_entry
from tests.helpers.samples import write_samples

PLACES = [(0, 0), (1, 1)]


@pytest.fixture
def job(settings):
    return settings()


@pytest.fixture
def make(job, store) -> Callable[..., PlanSource]:
    def of(deadline_s: float = 0.4, **more: object) -> PlanSource:
        return PlanSource(job.inputs, store, job.keys, who="rank 0", deadline_s=deadline_s, **more)

    return of


def publish(job, store: Store, iteration: int, data: bytes) -> None:
    keys = [job.keys.plan(split="train", iteration=iteration, replica=r, stage=s) for r, s in PLACES]
    store.put_all([(key, data) for key in keys])


def test_what_is_late_is_made_as_planners_make_it(job, store, make) -> None:
    plans = make()
    expected = {(r, s): data for r, s, data in PlannedSplits(job.inputs).entries("train", 5)}
    assert plans.fetch("train", 5, PLACES) == expected
    without = PlanSource(job.inputs, None, job.keys, who="rank 0", deadline_s=1e6)
    assert without.fetch("train", 5, PLACES) == expected


def test_plans_are_the_same_bytes_however_many_threads_make_them(job) -> None:
    iterations = range(8)
    alone = [PlannedSplits(job.inputs).entries("train", iteration) for iteration in iterations]
    shared = PlannedSplits(job.inputs)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda iteration: shared.entries("train", iteration), iterations)) == alone


def test_every_evaluation_is_of_the_same_samples(job) -> None:
    planned = PlannedSplits(job.inputs)
    ids = [
        {
            sample
            for *_, data in planned.entries("valid", i)
            for mb in decode_entry(data).micro_batches
            for sample in mb.sample_ids
        }
        for i in range(7)
    ]
    assert ids[:3] == ids[3:6] and ids[6] == ids[0] and len(set.union(*ids)) == 36


def test_after_a_late_plan_nothing_is_waited_for_until_planners_are_on_time_again(job, store, make) -> None:
    plans = make(planners=1)
    plans.fetch("train", 0, PLACES)
    assert plans.patience_s < 0.01
    for iteration in (1, 2):
        publish(job, store, iteration, b"theirs")
        assert set(plans.fetch("train", iteration, PLACES).values()) == {b"theirs"}
    assert plans.patience_s == 0.2, "of none that was waited for: half of the deadline"


def test_one_node_makes_what_is_late_for_all_of_them(job, store, make, monkeypatch, caplog) -> None:
    """Nodes take turns; where the one whose turn it is does not, either, each makes its own."""
    nodes = [make(deadline_s=100.0, planners=2, node=node, may_come=lambda: False) for node in range(2)]
    expected = {(r, s): data for r, s, data in PlannedSplits(job.inputs).entries("train", 4)}
    with ThreadPoolExecutor() as pool:
        other = pool.submit(nodes[0].fetch, "train", 4, PLACES)
        assert nodes[1].fetch("train", 4, PLACES) == expected
        assert other.result(60) == {place: expected[place] for place in PLACES}
    assert nodes[0]._planned is None, "it has made nothing"
    said = [text.partition(" s: ")[2] for text in caplog.messages]
    assert sorted(said) == [f"{who} makes it; later ones are not waited for" for who in ("node 1", "rank 0")]
    nodes[0]._most_s = 0.2
    assert nodes[0].fetch("train", 6, PLACES) == {
        (r, s): data for r, s, data in PlannedSplits(job.inputs).entries("train", 6)
    }
    key = job.keys.plan(split="train", iteration=4, replica=0, stage=0)
    assert key in store.read_progress([key])
    nodes[1].fetch("train", 4 + source._KEPT + 2, PLACES)
    assert key not in store.read_progress([key]), "left behind by all nodes"


@pytest.mark.parametrize(("first_s", "patience_s"), [(1.0, 10.0), (20.0, 120.0), (90.0, 150.0)])
def test_plans_that_take_long_are_waited_for_as_long_six_times(job, store, make, monkeypatch, first_s, patience_s):
    plans = make(deadline_s=300.0)
    now = [0.0]
    monkeypatch.setattr(source.time, "monotonic", lambda: now[0])

    def slow(keys, *, timeout_s, what):
        now[0] += first_s / len(PLACES)
        return keys[0], b"theirs"

    monkeypatch.setattr(store, "wait_any", slow)
    assert plans.patience_s == 150.0
    plans.fetch("train", 0, PLACES)
    assert plans.patience_s == patience_s


def test_planners_that_have_ended_are_not_waited_for(make) -> None:
    plans = make(deadline_s=600.0, may_come=lambda: False)
    assert len(plans.fetch("train", 0, PLACES)) == 4


def test_a_store_that_fails_is_asked_again_after_a_while_and_said(job, store, make, monkeypatch, caplog) -> None:
    plans = make()
    asked = []

    def gone(keys, **_):
        asked.append(keys)
        raise StoreError("the store is gone")

    monkeypatch.setattr(store, "wait_any", gone)
    for iteration in range(3):
        plans.announce("train", iteration)
        assert len(plans.fetch("train", iteration, PLACES)) == 4
    assert len(asked) == 1 and "the store is gone; rank 0 makes plans, and asks again in 60 s" in caplog.text
    monkeypatch.setattr(source, "_ASK_AGAIN_S", 0.0)
    plans._give_up(StoreError("x"))
    monkeypatch.undo()
    publish(job, store, 3, b"theirs")
    assert set(plans.fetch("train", 3, PLACES).values()) == {b"theirs"}


def test_a_planner_s_error_is_raised_and_so_is_one_here(job, settings, store, make) -> None:
    plans = make(deadline_s=60.0)
    publish(job, store, 0, b"theirs")
    publish_failure(store, job.keys, describe_failure(ValueError("sample 3"), who="planner 0", doing="testing"))
    assert plans.fetch("train", 0, PLACES), "what was published before"
    with pytest.raises(PlannerFailedError, match=r"planner 0 failed while testing: ValueError: sample 3\n"):
        plans.fetch("train", 1, PLACES)
    here = PlanSource(settings(memory_mb=1).inputs, None, job.keys, who="rank 8", deadline_s=1.0)
    with pytest.raises(PlannerFailedError, match=r"rank 8 failed while planning iteration 2 of train: Infeasible"):
        here.fetch("train", 2, PLACES)


def test_closing_ends_a_wait(make) -> None:
    plans = make(deadline_s=600.0)
    threading.Timer(0.1, plans.close).start()
    started = time.monotonic()
    with pytest.raises(StoreError, match="the source of plans is closed"):
        plans.fetch("train", 0, PLACES)
    assert time.monotonic() - started < 60


def test_plans_are_made_here_of_the_dataset_that_the_run_began_with_alone(settings, tmp_path) -> None:
    inputs = settings(iterations=4).inputs
    folder = shutil.copytree(inputs.data_folder, tmp_path / "data")
    began_with = drawn_by({path.name: file_digest(path) for path in folder.iterdir()})
    assert {"train.idx", "valid.idx"} <= began_with.keys() and "train.bin" not in began_with
    inputs = msgspec.structs.replace(inputs, data_folder=str(folder), files=began_with)
    keys = PlanKeys(job=new_job_name(), settings_digest=inputs.digest())
    opened = PlanSource(inputs, None, keys, who="rank 0", deadline_s=30)
    expected = opened.fetch("train", 0, [(0, 0)])
    shutil.rmtree(folder)
    folder.mkdir()
    write_samples(folder / "train", [[[0] * 5, [0] * 3]] * 200, 512)
    write_samples(folder / "valid", [[[0] * 5, [0] * 3]] * 200, 512)
    assert opened.fetch("train", 0, [(0, 0)]) == expected, "what is open stays"
    late = PlanSource(inputs, None, keys, who="rank 1", deadline_s=30)
    with pytest.raises(PlannerFailedError, match=f"expected the dataset {folder} that the run began with"):
        late.fetch("train", 1, [(0, 0)])
