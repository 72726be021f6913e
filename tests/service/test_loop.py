"""The planner's loop: what is planned when, what is deleted, what is said when it fails."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from megatron_dynapipe.core.errors import InfeasibleError, StoreError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.service import PlanSource, ServiceSettings, loop
from megatron_dynapipe.service.failure import decode_failure
from megatron_dynapipe.service.loop import PlannerLoop, SplitWindow
from megatron_dynapipe.store import Store, StoreAddress
from megatron_dynapipe.store.redis_store import RedisStore
from tests.helpers.waiting import until
from tests.store.memory_store import MemoryStore


class FakeSource:
    """One replica of two stages; remembers what it was asked for."""

    def __init__(self) -> None:
        self.planned: list[tuple[str, int]] = []
        self.fails_at: tuple[str, int] | None = None
        self.needed = 51.4
        self.prepared: list[tuple[str, object]] = []

    def entries(self, split: str, iteration: int, correction: object = None) -> Sequence[tuple[int, int, bytes]]:
        if (split, iteration) == self.fails_at:
            raise InfeasibleError("sample 17 needs 99 MB of 10 MB", hint="use a larger device")
        self.planned.append((split, iteration))
        return [(0, stage, bytes(10)) for stage in range(2)]

    def following(self, split: str, correction: object) -> None:
        self.prepared.append((split, correction))

    def over_rows(self) -> str:
        return ""


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_LOOK_S", 0.05)


def only_train(settings: ServiceSettings, **changes: object) -> ServiceSettings:
    """Settings whose one split is train, changed as job."""
    train = msgspec.structs.replace(settings.inputs.splits[0], **changes)
    return msgspec.structs.replace(settings, inputs=msgspec.structs.replace(settings.inputs, splits=(train,)))


@contextmanager
def running(settings: ServiceSettings, source: FakeSource, store: Store) -> Iterator[None]:
    """A planner whose training stands still from the block's end on."""

    def run() -> None:
        with pytest.raises(StoreTimeoutError):
            PlannerLoop(settings, source, store).run()  # type: ignore[arg-type]

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


def announce(settings: ServiceSettings, store: Store, split: str, iteration: int) -> None:
    store.announce(settings.keys.progress(split), iteration)


def iterations_in(store: Store, settings: ServiceSettings, split: str = "train") -> list[int]:
    """Of the first ones, those whose plans are there."""
    keys = [settings.keys.plan(split=split, iteration=i, replica=0, stage=0) for i in range(12)]
    there = store.read_progress(keys)
    return [i for i, key in enumerate(keys) if key in there]


def failure_in(store: Store, settings: ServiceSettings) -> bool:
    return bool(store.read_progress([settings.keys.error]))


def test_it_ends_when_all_is_planned(settings, source, store) -> None:
    job = only_train(settings(look_ahead=100), iterations=7)
    PlannerLoop(job, source, store).run()
    assert source.planned == [("train", iteration) for iteration in range(7)]
    assert iterations_in(store, job) == list(range(7))


@pytest.mark.parametrize(
    ("planner", "planners", "progress", "planned"),
    [(0, 1, 0, [0, 1, 2, 3, 4]), (1, 3, 0, [1, 4]), (0, 1, 2, [2, 3, 4, 5, 6]), (0, 2, 3, [4, 6])],
)
def test_iterations_are_shared_by_their_number_ahead_of_training(
    settings, source, store, planner, planners, progress, planned
):
    job = only_train(settings(planner=planner, planners=planners, look_ahead=4, idle_timeout_s=1.0))
    announce(job, store, "train", progress)
    with running(job, source, store):
        until(lambda: len(source.planned) == len(planned))
    assert [iteration for _, iteration in source.planned] == planned


@pytest.mark.parametrize(
    ("needed", "ahead", "said"),
    [
        (0.13, 8, "planning: 0.1 of the job's 2 cores would keep up, 8 iterations ahead"),
        (51.4, 107, "51.4 of the job's 2 cores would keep up, 107 iterations ahead; training will wait"),
    ],
)
def test_all_planners_are_as_far_ahead_as_the_first_plan_s_time_asks_for(settings, store, caplog, needed, ahead, said):
    """Whichever planner makes it: here the run goes on from iteration 21."""
    caplog.set_level(logging.INFO)
    job = only_train(settings(look_ahead=None, planners=2, idle_timeout_s=2.0), first_iteration=21)
    sources = FakeSource(), FakeSource()
    with running(job, sources[0], store):
        until(lambda: len(sources[0].planned) == 4)  # 22, 24, 26, 28
        sources[1].needed = needed
        with running(msgspec.structs.replace(job, planner=1), sources[1], store):
            until(lambda: len(sources[0].planned) + len(sources[1].planned) == ahead + 1)
    assert set(sources[0].prepared) == {("train", None)}, "while it waited"
    assert sorted(i for each in sources for _, i in each.planned) == list(range(21, 22 + ahead))
    assert sum(said in text for text in caplog.messages) == 1


def test_evaluations_are_planned_no_further_ahead(settings, source) -> None:
    job, store = settings(look_ahead=None), MemoryStore()
    planner = PlannerLoop(job, source, store)  # type: ignore[arg-type]
    store.announce(job.keys.ahead, 50)
    planner._look()
    assert [split.look_ahead for split in planner._splits] == [50, 8]


def test_as_many_iterations_are_planned_at_once_as_there_are_cores_and_published_in_order(settings, store) -> None:
    job = only_train(settings(look_ahead=100, cores=3), iterations=6)
    met = threading.Barrier(3)
    published: list[int] = []
    keys = [job.keys.plan(split="train", iteration=i, replica=0, stage=0) for i in range(6)]

    class Meeting(FakeSource):
        def entries(self, split: str, iteration: int, correction: object = None) -> Sequence[tuple[int, int, bytes]]:
            met.wait(30)  # for two others, which are planned at the same time
            until(lambda: iteration % 3 == 2 or iteration + 1 in [i for _, i in self.planned])  # the last ends first
            return super().entries(split, iteration)

    class Watched(MemoryStore):
        def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
            published.extend(keys.index(key) for key, _ in items[:1] if key in keys)
            super().put_all(items)

    source = Meeting()
    PlannerLoop(job, source, Watched()).run()  # type: ignore[arg-type]
    assert [i for _, i in source.planned] == [2, 1, 0, 5, 4, 3]
    assert published == [0, 1, 2, 3, 4, 5]


def test_splits_take_turns_and_what_training_has_left_behind_is_deleted(settings, source, store) -> None:
    job = settings(look_ahead=1, keep_behind=1, idle_timeout_s=2.0)
    with running(job, source, store):
        until(lambda: len(source.planned) == 4)
        assert source.planned == [("train", 0), ("valid", 0), ("train", 1), ("valid", 1)]
        for iteration in range(1, 5):  # training stands still while it evaluates
            announce(job, store, "valid", iteration)
            until(lambda iteration=iteration: source.planned[-1] == ("valid", iteration + 1))
    assert iterations_in(store, job, "valid") == [3, 4, 5] and iterations_in(store, job) == [0, 1]


def test_a_store_of_the_six_methods_serves_planners_and_ranks(settings, source) -> None:
    store = MemoryStore()
    job = only_train(settings(look_ahead=100), iterations=3)
    PlannerLoop(job, source, store).run()
    plans = PlanSource(job.inputs, store, job.keys, who="rank 0", deadline_s=4.0)
    assert plans.fetch("train", 2, [(0, 0), (0, 1)]) == {(0, 0): bytes(10), (0, 1): bytes(10)}
    plans.announce("train", 2)
    assert store.read_progress([job.keys.progress("train")]) == {job.keys.progress("train"): 2}


class FullStore(RedisStore):
    """Takes so many keys."""

    def __init__(self, address: StoreAddress, limit: int) -> None:
        super().__init__(address, retention_s=None)
        self.keys, self.limit = set[str](), limit

    def put_all(self, items: Sequence[tuple[str, bytes]]) -> None:
        for key, value in items:
            if len(self.keys) >= self.limit:
                raise StoreFullError("the store is full", hint="raise its maxmemory")
            super().put_all([(key, value)])
            self.keys.add(key)

    def delete(self, keys: Sequence[str]) -> None:
        super().delete(keys)
        self.keys.difference_update(keys)


def test_a_full_store_holds_whole_iterations_and_stops_nothing(settings, source) -> None:
    job = only_train(settings(look_ahead=8, keep_behind=0, idle_timeout_s=3.0))
    store = FullStore(job.store, limit=7)
    with running(job, source, store):
        for iteration in range(6):
            announce(job, store, "train", iteration)
            until(lambda iteration=iteration: {iteration, iteration + 2} <= set(iterations_in(store, job)))
    assert len(store.keys) == 6 and not failure_in(store, job)


def test_a_store_that_fails_is_asked_again_and_filled_again(settings, source, store, monkeypatch) -> None:
    job = only_train(settings(look_ahead=2, idle_timeout_s=3.0))
    failed = []

    def gone(topics: Sequence[str]) -> None:
        failed.append(topics)
        raise StoreError("it is gone")

    with running(job, source, store):
        until(lambda: len(source.planned) == 3)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(store, "read_progress", gone)
            until(lambda: failed)
            store.delete([job.keys.plan(split="train", iteration=i, replica=0, stage=0) for i in range(3)])
        announce(job, store, "train", 1)
        until(lambda: ("train", 3) in source.planned)
    assert iterations_in(store, job)[-3:] == [1, 2, 3] and not failure_in(store, job)


def test_its_failure_reaches_the_ranks_after_the_plans_made_before(settings, source, store) -> None:
    job = only_train(settings(look_ahead=9))
    source.fails_at = ("train", 3)
    with pytest.raises(InfeasibleError):
        PlannerLoop(job, source, store).run()
    assert iterations_in(store, job) == [0, 1, 2]
    error = decode_failure(store.wait_any([job.keys.error], timeout_s=5, what="it")[1])
    assert error.message.startswith(
        "planner 0 failed while planning iteration 3 of train: "
        "InfeasibleError: sample 17 needs 99 MB of 10 MB\n--- from its process ---\nTraceback (most recent call last):"
    )
    assert "test_loop.py" in error.message and error.hint == "use a larger device"


def test_a_clean_end_deletes_what_was_published_on_a_shared_server(settings, source, store) -> None:
    job = only_train(settings(look_ahead=100), iterations=3)
    for retention_s, left in ((None, 3), (60, 0)):
        planner = PlannerLoop(msgspec.structs.replace(job, retention_s=retention_s), source, store)
        planner.run()
        store.announce(job.keys.progress("train"), 1)
        planner.close()
        assert len(iterations_in(store, job)) == left
        assert len(store.read_progress([job.keys.progress("train")])) == (left > 0)


def test_a_clean_end_deletes_what_a_store_out_of_reach_had_hidden(settings, source, store) -> None:
    job = msgspec.structs.replace(only_train(settings(look_ahead=100), iterations=3), retention_s=60)
    planner = PlannerLoop(job, source, store)
    planner.run()
    for split in planner._splits:
        split.published.clear()
    planner.close()
    assert iterations_in(store, job) == []


def test_a_clean_end_without_a_store_is_one_warning(settings, source, store, monkeypatch, caplog) -> None:
    def gone(_keys: Sequence[str]) -> None:
        raise StoreError("plan store redis://here failed")

    planner = PlannerLoop(msgspec.structs.replace(only_train(settings()), retention_s=60), source, store)
    monkeypatch.setattr(store, "delete", gone)
    planner.close()
    assert "plan store redis://here failed" in caplog.text


def test_iterations_that_are_named_as_left_behind_are_not_named_again(settings) -> None:
    job = only_train(settings(look_ahead=4, keep_behind=1))
    window = SplitWindow(job.inputs.splits[0], job)
    window.published = {0, 1, 2, 3}
    window.progress = 3
    assert (window.left_behind(), window.left_behind()) == ([0, 1], [])
    window.progress = 40
    assert window.left_behind() == [2, 3] and window.unplanned == [40, 41, 42, 43, 44]
