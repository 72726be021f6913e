"""The rank's iterator: order, resume, replay, errors of its thread, deadlines, closing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron_dynapipe.core.errors import DataError, PlanError, StoreTimeoutError
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.iterator import PlannedIterator
from megatron_dynapipe.store.entry import StageEntry
from tests.data.dataset import collator_of, micro_batch, write_dataset
from tests.helpers.plans import stage_entry


@pytest.fixture
def collator(tmp_path: Path) -> Collator:
    return collator_of(write_dataset(tmp_path), RequiredFields(tokens=True, labels=True))


def plan(iteration: int) -> StageEntry:
    """Iteration i runs samples i mod 4 and (i + 1) mod 4, one per micro-batch."""
    return stage_entry(iteration, *(micro_batch([(iteration + at) % 4], Shape(1, 8, 8)) for at in range(2)))


class Recorder:
    """A fetch that counts its calls, and can be made to wait."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.called = threading.Condition()

    def __call__(self, iteration: int) -> StageEntry:
        with self.called:
            self.fetched.append(iteration)
            self.called.notify_all()
        assert self.gate.wait(60)
        return plan(iteration)

    def await_calls(self, count: int) -> None:
        with self.called:
            assert self.called.wait_for(lambda: len(self.fetched) >= count, 10)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.gate.set()


def test_yields_iterations_in_order_from_where_it_is_told(collator: Collator) -> None:
    with (
        closing(PlannedIterator(plan, collator, stop_iteration=6)) as whole,
        closing(PlannedIterator(plan, collator, start_iteration=4, stop_iteration=6)) as resumed,
    ):
        items = list(whole)
        for old, new in zip(items[4:], resumed, strict=True):
            assert old.entry == new.entry
            for one, other in zip(old.micro_batches, new.micro_batches, strict=True):
                assert torch.equal(one.labels, other.labels)
    assert [item.entry.iteration for item in items] == [0, 1, 2, 3, 4, 5]
    assert [[batch.index for batch in item.micro_batches] for item in items] == [[0, 1]] * 6
    assert items[4].micro_batches[0].tokens[0, :4].tolist() == [11, 12, 13, 0]
    assert [thread.name for thread in threading.enumerate() if "prefetch" in thread.name] == []


def test_stays_so_far_ahead(collator: Collator, recorder: Recorder) -> None:
    """With two ready, the thread waits; taking one lets it prepare one more, but none beyond the last."""
    with closing(PlannedIterator(recorder, collator, start_iteration=2, stop_iteration=6, ahead=2)) as iterator:
        time.sleep(0.02)
        assert recorder.fetched == [], "before the first is asked for"
        assert iterator.await_next() is None
        recorder.await_calls(2)
        next(iterator)
        recorder.await_calls(3)
        time.sleep(0.05)
        assert recorder.fetched == [2, 3, 4]
        assert len(list(iterator)) == 3 and iterator.await_next() is None
        with pytest.raises(StopIteration):
            next(iterator)
    assert recorder.fetched == [2, 3, 4, 5]


def test_counts_the_wait(collator: Collator, recorder: Recorder) -> None:
    recorder.gate.clear()
    with closing(PlannedIterator(recorder, collator)) as iterator:
        threading.Timer(0.1, recorder.gate.set).start()
        assert iterator.await_next() is None
        assert 0.05 < next(iterator).waited_seconds < 5
        iterator.await_next()
        assert next(iterator).waited_seconds < 0.05


def failing_at(iteration: int, error: Exception) -> Callable[[int], StageEntry]:
    def fetch(asked: int) -> StageEntry:
        if asked == iteration:
            raise error
        return plan(asked)

    return fetch


def test_errors_keep_their_type_and_come_when_due(collator: Collator) -> None:
    error = PlanError("no such plan", hint="plan it")
    with closing(PlannedIterator(failing_at(2, error), collator, ahead=4)) as iterator:
        assert [next(iterator).entry.iteration for _ in range(2)] == [0, 1]
        assert iterator.await_next() is error
        for _ in range(2):
            with pytest.raises(PlanError, match="no such plan"):
                next(iterator)


def test_plans_that_cannot_be_collated(collator: Collator) -> None:
    with closing(PlannedIterator(stage_entry, collator)) as iterator:
        assert next(iterator).micro_batches == (), "one without any can"
    entry = stage_entry(0, micro_batch([0], Shape(1, 2, 8)))
    with closing(PlannedIterator(lambda _: entry, collator)) as iterator:
        with pytest.raises(PlanError, match="sample 0 needs 3"):
            next(iterator)


def test_deadline_names_what_it_waits_for(collator: Collator, recorder: Recorder) -> None:
    recorder.gate.clear()
    with closing(PlannedIterator(recorder, collator, start_iteration=3, timeout_seconds=0.05)) as iterator:
        with pytest.raises(StoreTimeoutError) as caught:
            next(iterator)
        assert str(caught.value) == (
            "expected iteration 3 to be ready within 0.05 s; still waiting for its thread to fetch the plan of"
            " iteration 3\nhint: look at the planner process and the plan store"
        )
        recorder.gate.set()  # late is not lost: the next attempt gets it
        assert next(iterator).entry.iteration == 3


def test_closing_ends_a_wait(collator: Collator, recorder: Recorder) -> None:
    recorder.gate.clear()
    iterator = PlannedIterator(recorder, collator)
    closer = threading.Thread(target=lambda: (recorder.await_calls(1), iterator.close(), iterator.close()))
    closer.start()
    error = iterator.await_next()
    recorder.gate.set()
    closer.join(60)
    assert isinstance(error, DataError) and "iterator closed while waiting for iteration 0" in str(error)
    with pytest.raises(DataError, match="expected an open iterator for iteration 0, it is closed"):
        next(iterator)
