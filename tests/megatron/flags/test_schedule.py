"""`--dynapipe-schedule`: what a schedule cannot order is refused before training."""

from argparse import Namespace

import pytest

from megatron_dynapipe.choosing.trial import unordered_because
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.instructions import Backward, Forward
from megatron_dynapipe.core.native import PassOrder
from megatron_dynapipe.core.orders import SCHEDULES, ScheduleSettings
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.megatron.flags.batch_layout import schedule


def args(method: str, stages: int, chunks: int | None) -> Namespace:
    return Namespace(
        dynapipe_schedule=method,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
    )


@pytest.mark.parametrize("method", SCHEDULES)
@pytest.mark.parametrize(("stages", "chunks"), [(1, None), (2, None), (4, 2), (3, 4)])
def test_every_schedule_here_orders_every_pipeline(method: str, stages: int, chunks: int | None) -> None:
    assert schedule(args(method, stages, chunks)) == ScheduleSettings(method=method)


def backward_first(problem: ScheduleProblem) -> PassOrder:
    rows = range(problem.micro_batches)
    return tuple(tuple(kind(row) for row in rows for kind in (Backward, Forward)) for _ in range(problem.stages))


def plain(problem: ScheduleProblem) -> PassOrder:
    assert problem.chunks == 1, "one chunk per rank"
    return SCHEDULES["1f1b"](problem)


@pytest.mark.parametrize(
    ("order", "stages", "chunks", "reason"),
    [(plain, 2, 2, "AssertionError: one chunk per rank"), (backward_first, 2, 1, "StallError|PlanningError")],
)
def test_a_schedule_that_cannot_order_the_pipeline_is_refused(order, stages, chunks, reason, monkeypatch) -> None:
    monkeypatch.setattr("megatron_dynapipe.choosing.trial.SCHEDULES", {"mine": order})
    message = f"--dynapipe-schedule mine cannot order .* {stages} .* {chunks} .*({reason})"
    with pytest.raises(ConfigError, match=message):
        schedule(args("mine", stages, chunks))
    assert bool(unordered_because("mine", stages=2, chunks=1)) == (order is backward_first)
