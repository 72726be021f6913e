"""The planner's loop on a store in memory: what is planned when, what is deleted, what is said when it fails."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from megatron_dynapipe.errors import (
    InfeasibleError,
    PlanError,
    PlannerFailedError,
    StoreFullError,
    StoreTimeoutError,
)
from megatron_dynapipe.plan.codec import encode
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.service import PlanClient, ServiceSettings
from megatron_dynapipe.service.loop import PlannerLoop, SplitWindow
from tests.helpers.memory_store import MemoryStore
from tests.helpers.plans import stage_entry
from tests.helpers.waiting import until


class FakeSource:
    """One replica of two stages; remembers what it was asked for."""

    def __init__(self) -> None:
        self.planned: list[tuple[str, int]] = []
        self.fails_at: tuple[str, int] | None = None

    def entries(self, split: str, iteration: int) -> Sequence[tuple[int, int, bytes]]:
        if (split, iteration) == self.fails_at:
            raise InfeasibleError("sample 17 needs 99 MB of 10 MB", hint="use a larger device")
        self.planned.append((split, iteration))
        return [(0, stage, encode(entry(iteration, stage))) for stage in range(2)]


def entry(iteration: int, stage: int) -> StageEntry:
    return stage_entry(iteration, stage=stage, pipeline_stages=2)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    opened = MemoryStore()
    yield opened
    opened.close()


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


def only_train(settings: ServiceSettings, **changes: object) -> ServiceSettings:
    """Settings whose one split is train, changed as job."""
    train = msgspec.structs.replace(settings.inputs.splits[0], **changes)
    return msgspec.structs.replace(settings, inputs=msgspec.structs.replace(settings.inputs, splits=(train,)))


@contextmanager
def running(settings: ServiceSettings, source: FakeSource, store: MemoryStore) -> Iterator[threading.Thread]:
    def run() -> None:
        try:
            PlannerLoop(settings, source, store).run()
        except Exception as error:
            if "closed" not in str(error):
                raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        store.close()
        thread.join(60)


def client(settings: ServiceSettings, store: MemoryStore, *, stage: int = 0, deadline_s: float = 60) -> PlanClient:
    return PlanClient(store, settings.keys, replica=0, stage=stage, deadline_s=deadline_s)


def test_it_ends_when_all_is_planned(settings, source, store) -> None:
    PlannerLoop(only_train(settings(look_ahead=100), iterations=7), source, store).run()
    assert source.planned == [("train", iteration) for iteration in range(7)]


@pytest.mark.parametrize(
    ("planner", "planners", "planned"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (0, 3, [0, 3, 6, 1, 2, 4]),  # its own, then what is missing of the near half
        (1, 3, [1, 4, 7, 0, 2, 3]),
        (3, 3, [0, 1, 2, 3, 4]),  # a stand-in has none of its own
    ],
)
def test_iterations_are_shared_by_their_number(settings, source, store, planner, planners, planned) -> None:
    job = only_train(settings(planner=planner, planners=planners, look_ahead=8))
    with running(job, source, store):
        until(lambda: len(source.planned) == len(planned))
        time.sleep(0.05)
        assert [iteration for _, iteration in source.planned] == planned


def test_several_planners_plan_everything(settings, store) -> None:
    sources = [FakeSource() for _ in range(3)]
    threads = []
    for planner, own in enumerate(sources):
        job = only_train(settings(planner=planner, planners=3, look_ahead=100, job="shared"), iterations=9)
        threads.append(threading.Thread(target=PlannerLoop(job, own, store).run))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {iteration for own in sources for _, iteration in own.planned} == set(range(9))


def test_what_is_published_is_not_planned_again(settings, source, store) -> None:
    job = only_train(settings(look_ahead=3))
    store.announce(job.keys.done("train", 1), 100)
    with running(job, source, store):
        until(lambda: len(source.planned) == 3)
        assert source.planned == [("train", 0), ("train", 2), ("train", 3)]


def test_a_store_that_came_back_empty_is_filled_again(settings, source, store) -> None:
    job = only_train(settings(look_ahead=2))
    with running(job, source, store):
        client(job, store).announce("train", 5)
        until(lambda: ("train", 7) in source.planned)
        with store._changed:
            for held in (store._values, store._progress):
                held.clear()
        store.interruptions += 1
        client(job, store).announce("train", 6)
        assert client(job, store).fetch("train", 6).iteration == 6
        until(lambda: source.planned[-1] == ("train", 8))


class ForgetfulStore(MemoryStore):
    """Comes back empty between the plans of an iteration and the word that they are there."""

    lost = 0

    def announce(self, topic: str, value: int) -> None:
        if topic.endswith(":train:3:done") and not self.lost:
            self.lost += 1
            self.interruptions += 1
            with self._changed:
                for held in (self._values, self._progress):
                    held.clear()
        super().announce(topic, value)


def test_what_is_said_to_be_published_is_there(settings, source) -> None:
    """Every rank fetches its share, also of what was lost."""
    job, store = only_train(settings(look_ahead=4)), ForgetfulStore()
    assert job.keys.done("train", 3).endswith(":train:3:done")
    with running(job, source, store):
        for iteration in range(20):
            for stage in range(2):
                assert client(job, store, stage=stage).fetch("train", iteration) == entry(iteration, stage)
            client(job, store).announce("train", iteration)
    assert store.lost == 1


class FullStore(MemoryStore):
    """Takes plans of so many bytes together."""

    limit = 10**9

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        for key, value in items:
            if sum(map(len, self._values.values())) + len(value) > self.limit:
                raise StoreFullError("the store is full", hint="raise its maxmemory")
            self.put(key, value)


def test_a_full_store_slows_planners_down_and_stops_nothing(settings, source) -> None:
    store = FullStore()
    size = sum(len(encode(entry(0, stage))) for stage in range(2))
    store.limit = 3 * size + size // 2
    job = only_train(settings(look_ahead=8, keep_behind=0))
    with running(job, source, store):
        for iteration in range(12):
            for stage in range(2):
                assert client(job, store, stage=stage).fetch("train", iteration).iteration == iteration
            client(job, store).announce("train", iteration)


def test_a_store_too_small_for_one_iteration_ends_the_planner(settings, source) -> None:
    store = FullStore()
    store.limit = 10
    job = only_train(settings(full_timeout_s=0.2))
    with pytest.raises(StoreFullError, match="the store is full"):
        PlannerLoop(job, source, store).run()
    with pytest.raises(PlannerFailedError, match="while publishing iteration 0 of train: StoreFullError"):
        client(job, store).fetch("train", 0)


def test_training_waits_for_room_to_say_how_far_it_is(settings, store, monkeypatch) -> None:
    refusals = [StoreFullError("the store is full")] * 2
    announce = store.announce

    def refuse(topic: str, value: int) -> None:
        if refusals:
            raise refusals.pop()
        announce(topic, value)

    monkeypatch.setattr(store, "announce", refuse)
    job = settings()
    client(job, store).announce("train", 3)
    assert store.read_progress([job.keys.progress("train")]) == {job.keys.progress("train"): 3}
    refusals += [StoreFullError("the store is full")] * 99
    with pytest.raises(StoreFullError):
        client(job, store, deadline_s=0.15).announce("train", 4)


def test_splits_take_turns_and_neither_waits_for_the_other(settings, source, store) -> None:
    job = settings(look_ahead=1)
    with running(job, source, store):
        until(lambda: len(source.planned) == 4)
        assert source.planned == [("train", 0), ("valid", 0), ("train", 1), ("valid", 1)]
        # Training stands still while it evaluates.
        for iteration in range(1, 5):
            client(job, store).announce("valid", iteration)
            until(lambda iteration=iteration: source.planned[-1] == ("valid", iteration + 1))
        client(job, store).announce("train", 1)
        until(lambda: source.planned[-1] == ("train", 2))


def test_plans_that_training_has_left_behind_are_forgotten(settings, source, store) -> None:
    job = only_train(settings(look_ahead=2, keep_behind=3))
    with running(job, source, store):
        for iteration in range(12):
            client(job, store).announce("train", iteration)
            until(lambda iteration=iteration: ("train", iteration + 2) in source.planned)
        kept = sorted(int(key.split(":")[4]) for key in store._values if key.endswith(":0:0"))
        assert kept == list(range(8, 14))
        with pytest.raises(
            StoreTimeoutError, match=r"waited 0\.05 s for the plan of iteration 7 of train for replica 0"
        ):
            client(job, store, deadline_s=0.05).fetch("train", 7)


def test_its_failure_reaches_the_ranks_after_the_plans_made_before(settings, source, store) -> None:
    job = only_train(settings(look_ahead=9))
    source.fails_at = ("train", 3)
    with pytest.raises(InfeasibleError):
        PlannerLoop(job, source, store).run()
    for iteration in range(3):
        assert client(job, store).fetch("train", iteration).iteration == iteration
    with pytest.raises(PlannerFailedError) as caught:
        client(job, store).fetch("train", 3)
    assert caught.value.message.startswith(
        "planner 0 failed while planning iteration 3 of train: "
        "InfeasibleError: sample 17 needs 99 MB of 10 MB\n--- from its process ---\nTraceback (most recent call last):"
    )
    assert "test_loop.py" in caught.value.message
    assert caught.value.hint == "use a larger device"


def test_training_that_stands_still_too_long_is_taken_for_dead(settings, source, store) -> None:
    job = settings(idle_timeout_s=0.1)
    with pytest.raises(StoreTimeoutError, match=r"waited 0\.1 s for training to go on"):
        PlannerLoop(job, source, store).run()
    with pytest.raises(
        PlannerFailedError, match="failed while waiting for training: train at 0, valid at 0: StoreTime"
    ):
        client(job, store).fetch("train", 99)


def test_a_plan_of_another_rank_under_our_key_is_refused(settings, store) -> None:
    job = settings()
    store.put(job.keys.plan(split="train", iteration=3, replica=0, stage=0), encode(entry(3, 1)))
    with pytest.raises(
        PlanError, match=r"expected the plan of \(iteration, replica, stage\) \(3, 0, 0\) under .*, got \(3, 0, 1\)"
    ):
        client(job, store).fetch("train", 3)


@pytest.fixture
def window(settings):
    """A window of the training split, changed as asked."""

    def make(*, first_iteration: int = 0, iterations: int | None = None, **changes: object) -> SplitWindow:
        job = only_train(settings(**changes), first_iteration=first_iteration, iterations=iterations)
        return SplitWindow(job.inputs.splits[0], job)

    return make


def plan(window: SplitWindow, size: int = 10) -> list[int]:
    """Plan for as long as there is room; the iterations."""
    found = []
    while (iteration := window.own()) is not None:
        window.add(iteration, size)
        found.append(iteration)
    return found


@pytest.mark.parametrize(
    ("limits", "progress", "size", "planned"),
    [
        ({"look_ahead": 3}, 0, 10, [0, 1, 2, 3]),
        ({"look_ahead": 3}, 2, 10, [2, 3, 4, 5]),
        ({"look_ahead": 8, "look_ahead_bytes": 30}, 0, 10, [0, 1, 2]),
        ({"look_ahead": 8, "look_ahead_bytes": 5}, 0, 10, [0, 1]),  # the next one always may
        ({"look_ahead": 3, "iterations": 2}, 0, 10, [0, 1]),
    ],
)
def test_it_is_bounded_in_iterations_and_bytes(window, limits, progress, size, planned) -> None:
    found = window(**limits)
    found.reach(progress)
    assert plan(found, size) == planned


def test_training_leaves_iterations_behind_once(window) -> None:
    found = window(look_ahead=4, keep_behind=1)
    plan(found)
    found.reach(3)
    assert found.left_behind() == [0, 1]
    assert found.left_behind() == []
    found.reach(4)
    assert found.left_behind() == [2]


def test_one_that_learns_late_how_far_training_is_goes_on_there(window) -> None:
    found = window(look_ahead=4, keep_behind=2)
    assert plan(found) == [0, 1, 2, 3, 4]  # into a store that had come back empty
    found.reach(40)
    assert plan(found) == [40, 41, 42, 43, 44]
    assert found.left_behind() == [0, 1, 2, 3, 4, 34, 35, 36, 37]
    assert found.left_behind() == []


def test_one_that_publishes_late_deletes_what_it_published(window) -> None:
    found = window(look_ahead=4, keep_behind=1)
    found.reach(9)
    found.left_behind()
    found.add(3, 10)
    assert found.left_behind() == [3]


def test_a_limit_that_a_full_store_has_lowered_grows_with_training(window) -> None:
    found = window(look_ahead=8, look_ahead_bytes=1000)
    found.bytes_limit = 32
    for progress in range(1, 200):
        found.reach(progress)
    assert found.bytes_limit == 1000
