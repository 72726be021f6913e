"""The clock by which a job of thousands of ranks is simulated."""

from argparse import Namespace

import pytest

from benchmarks.service.large_job import clock


def test_training_waits_for_its_first_plans_alone_where_planners_keep_up() -> None:
    options = Namespace(planners=100, iterations=60, seconds=1.0)
    waits, spans = clock(options, 24, 10.0, 30.0, [9.0, 11.0])
    assert [iteration for iteration, wait in enumerate(waits) if wait > 0] == [0, 3]
    assert waits[0] == 10.0 and waits[3] == pytest.approx(30 + 11 - 10 - 3)
    assert spans[2] == (0.0, 10.0) and spans[3][0] == 30.0


def test_training_waits_where_there_are_too_few_planners_or_none_may_be_ahead() -> None:
    few, _ = clock(Namespace(planners=5, iterations=60, seconds=1.0), 24, 10.0, 30.0, [10.0])
    assert sum(few) > 60, "two seconds an iteration, of which one is trained"
    short, _ = clock(Namespace(planners=100, iterations=60, seconds=1.0), 5, 10.0, 30.0, [10.0])
    assert sum(wait > 0 for wait in short[20:]) > 5
