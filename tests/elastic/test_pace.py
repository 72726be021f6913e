"""Checkpoints are as near to each other as their share of the time allows."""

import pytest

from megatron_dynapipe.elastic.pace import SAVE_EVERY, SHARE, SavePace


def paced(iteration_s: float, *saves_s: float) -> SavePace:
    pace = SavePace()
    for save_s in saves_s:
        for _ in range(pace.every):
            pace.trained(iteration_s)
        pace.saved(save_s)
    return pace


@pytest.mark.parametrize(
    ("iteration_s", "save_s", "every"),
    [(1.0, 0.1, 50), (1.0, 1.0, 50), (0.069, 0.115, 100), (0.1, 1.0, 800), (5.0, 60.0, 800)],
)
def test_saving_takes_its_share_of_the_time_at_most(iteration_s: float, save_s: float, every: int) -> None:
    pace = paced(iteration_s, 30.0, save_s)
    assert pace.every == every
    assert save_s / (every * iteration_s + save_s) <= SHARE


def test_the_first_save_does_not_count_and_another_long_one_is_outlived() -> None:
    pace = paced(1.0, 60.0)
    assert pace.every == SAVE_EVERY
    assert pace.saved(20.0)
    assert pace.every == 1600
    assert not pace.saved(0.5)
    assert pace.saved(0.5)
    assert pace.every == SAVE_EVERY
    assert "every 50 iterations from now on (1.0% of the time)" in str(pace)


def test_what_is_near_the_limit_does_not_go_to_and_fro() -> None:
    pace = paced(1.0, 2.0, 2.0, 2.1)
    assert pace.every == 200
    assert not any(pace.saved(2.0) for _ in range(9))
    assert any(pace.saved(1.5) for _ in range(5))
    assert pace.every == 100


def test_a_save_before_any_iteration_changes_nothing() -> None:
    pace = SavePace()
    assert not pace.saved(10.0)
    assert not pace.saved(10.0)
    assert pace.every == SAVE_EVERY
