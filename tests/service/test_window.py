"""How far ahead a planner may plan: iterations, bytes, and what others have claimed."""

import msgspec
import pytest

from megatron_dynapipe.service.window import SplitWindow


@pytest.fixture
def window(settings):
    """A window of the training split whose settings are changed as told."""

    def make(*, first_iteration: int = 0, iterations: int | None = None, **changes: object) -> SplitWindow:
        told = settings(**changes)
        split = msgspec.structs.replace(told.inputs.splits[0], first_iteration=first_iteration, iterations=iterations)
        return SplitWindow(split, told)

    return make


def plan(window: SplitWindow, size: int = 10) -> list[int]:
    """Plan for as long as there is room; the iterations."""
    found = []
    while window.has_room:
        window.published(window.next, size)
        found.append(window.next)
        window.next += 1
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


def test_bytes_are_those_ahead_of_training(window) -> None:
    found = window(look_ahead=4, keep_behind=0)
    plan(found)
    found.reach(3)
    assert (found.bytes_ahead, found.depth) == (20, 1)


def test_what_another_has_claimed_is_missed_until_it_is_published_or_passed(window) -> None:
    found = window(iterations=2)
    for iteration in range(2):
        found.claimed_by_another(iteration)
        found.next += 1
    assert not found.is_planned
    found.published(0, 10)
    assert found.others == {1}
    found.reach(2)
    assert found.is_planned


def test_training_leaves_iterations_behind_once(window) -> None:
    found = window(look_ahead=4, keep_behind=1)
    plan(found)
    found.reach(3)
    assert found.left_behind() == [0, 1]
    assert found.left_behind() == []
    found.reach(4)
    assert found.left_behind() == [2]


def test_one_that_joins_clears_away_what_was_left(window) -> None:
    found = window(keep_behind=2)
    found.join(40)
    assert found.next == 40
    assert found.left_behind() == [36, 37]


def test_one_that_learns_late_how_far_training_is_goes_on_there(window) -> None:
    found = window(look_ahead=4, keep_behind=2)
    assert plan(found) == [0, 1, 2, 3, 4]  # into a store that had come back empty
    found.reach(40)
    assert plan(found) == [40, 41, 42, 43, 44]
    assert found.left_behind() == [0, 1, 2, 3, 4, 36, 37]
    assert found.left_behind() == []


def test_after_an_interruption_it_looks_again_from_the_iteration_in_training(window) -> None:
    found = window(look_ahead=4)
    plan(found)
    found.reach(2)
    found.look_again()
    assert (found.next, found.bytes_ahead) == (2, 0)
    assert plan(found) == [2, 3, 4, 5, 6]


def test_a_limit_that_a_full_store_taught_grows_with_training(window) -> None:
    found = window(look_ahead=8, look_ahead_bytes=1000)
    found.bytes_limit = 32
    for progress in range(1, 200):
        found.reach(progress)
    assert found.bytes_limit == 1000
