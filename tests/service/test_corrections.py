"""Plans of corrected costs: under keys of their own, the same wherever they are made."""

import threading

import msgspec
import pytest

from megatron_dynapipe.service import PlanSource, planned_splits
from megatron_dynapipe.service.corrections import Correction, in_force
from megatron_dynapipe.service.loop import PlannerLoop
from megatron_dynapipe.service.over_rows import ComparedSplits
from megatron_dynapipe.service.planned_splits import PlannedSplits

PLACES = [(0, 0), (1, 1)]
SLOW = Correction(number=1, first_iteration=3, percents=((100, 100, 100), (180, 180, 180)))
LATER = Correction(number=2, first_iteration=5, percents=((100, 100, 100), (100, 140, 100)))


def test_the_latest_of_those_that_have_begun_is_in_force() -> None:
    numbers = [each and each.number for each in (in_force([SLOW, LATER], iteration) for iteration in range(2, 7))]
    assert numbers == [None, 1, 1, 2, 2]


def test_planners_and_nodes_make_the_same_plans_with_what_was_measured(settings, store) -> None:
    job = settings(iterations=7, look_ahead=2)
    alone = PlannedSplits(job.inputs)
    expected = [
        {(r, s): data for r, s, data in alone.entries("train", iteration, in_force([SLOW, LATER], iteration))}
        for iteration in range(7)
    ]
    without = [{(r, s): data for r, s, data in alone.entries("train", iteration)} for iteration in range(7)]
    assert [one == other for one, other in zip(expected, without, strict=True)] == [True] * 3 + [False] * 4
    of_planners = PlanSource(job.inputs, store, job.keys, who="rank 0", deadline_s=60.0)
    here = PlanSource(job.inputs, None, job.keys, who="rank 1", deadline_s=60.0)
    trained = msgspec.structs.replace(job.inputs, splits=job.inputs.splits[:1])
    loop = PlannerLoop(msgspec.structs.replace(job, inputs=trained), ComparedSplits(trained), store)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for iteration in range(7):
        if iteration == 0:
            assert of_planners.publish(SLOW) and of_planners.publish(LATER)
            for source in (of_planners, here):
                source.correct(SLOW)
                source.correct(LATER)
        of_planners.announce("train", iteration)
        for source in (of_planners, here):
            found = source.fetch("train", iteration, PLACES)
            assert {place: found[place] for place in PLACES} == {place: expected[iteration][place] for place in PLACES}
    evaluated = here.fetch("valid", 4, PLACES)
    assert evaluated == {(r, s): data for r, s, data in alone.entries("valid", 4)}, "with costs as they are"
    thread.join(60)
    assert not thread.is_alive(), "all is planned"


@pytest.mark.parametrize("has_rows", [True, False])
def test_what_corrected_plans_follow_follows_the_first_ones(settings, monkeypatch, has_rows) -> None:
    """So that a correction takes a part of the time of three searches, and none where nothing can be followed."""
    followed = []

    def of(planner, batches):
        followed.append(planner.settings.precedents)
        return ((1_000_000, ((0, 8, 8, *[0] * 2),) if has_rows else ()),)

    monkeypatch.setattr(planned_splits, "precedents_of", of)
    planned = PlannedSplits(settings().inputs)
    for correction in (None, SLOW, LATER, SLOW):
        planned.following("train", correction)
    assert [bool(each) for each in followed] == [False, True, True][: 3 if has_rows else 1]
    assert planned.following("train", None).settings.corrections == ()


def test_a_planner_that_knows_nothing_of_it_is_not_listened_to(settings, store) -> None:
    """Its plans lie under other keys; this node makes its own."""
    job = settings()
    source = PlanSource(job.inputs, store, job.keys, who="rank 0", deadline_s=0.4)
    stale = [(job.keys.plan(split="train", iteration=3, replica=r, stage=s), b"of old costs") for r, s in PLACES]
    store.put_all(stale)
    source.correct(SLOW)
    expected = {(r, s): data for r, s, data in PlannedSplits(job.inputs).entries("train", 3, SLOW)}
    assert source.fetch("train", 3, PLACES) == expected


@pytest.mark.parametrize("has_store", [False, True])
def test_without_a_store_that_answers_nothing_is_published(settings, store, monkeypatch, has_store) -> None:
    job = settings()
    source = PlanSource(job.inputs, store if has_store else None, job.keys, who="rank 0", deadline_s=1.0)
    if has_store:
        from megatron_dynapipe.core.errors import StoreError

        def unreachable(_items: object) -> None:
            raise StoreError("the store does not answer")

        monkeypatch.setattr(store, "put_all", unreachable)
    assert not source.publish(SLOW)
