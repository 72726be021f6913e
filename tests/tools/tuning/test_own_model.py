"""Tuning a user's own model: every division of the devices, judged as its planner plans it."""

import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing import Network
from megatron_dynapipe.segments import divide_segments, segment_settings
from megatron_dynapipe.tools.tuning import tune_segments
from megatron_dynapipe.tools.tuning.evaluate import StepRates, step_ns
from megatron_dynapipe.tools.tuning.space import Status
from tests.core.planner_cases import batch_of
from tests.modules.test_planning import costs_of

NETWORK = Network(devices_per_node=4)
QUICK = ScheduleSettings(search_evaluations=20)
LENGTHS = [(n, 0) for n in (9, 33, 30, 60, 12, 8, 50, 17) * 4]
BATCH = batch_of(*LENGTHS)
LIMIT = 10**9


def test_every_division_is_planned_and_the_fastest_is_first() -> None:
    costs, batches = costs_of(1, 1, 1, 3, 2), [BATCH, batch_of(*LENGTHS[:20])]
    tuning = tune_segments(costs, batches, devices=4, memory_limit_bytes=LIMIT, network=NETWORK, schedule=QUICK)
    assert {(each.data_parallel, each.pipeline_parallel) for each in tuning.layouts} == {(4, 1), (2, 2), (1, 4)}
    times = [each.predicted_ms for each in tuning.layouts if each.predicted_ms is not None]
    assert len(times) == 3 and times == sorted(times)
    assert tuning.plans == 6
    for layout, settings in zip(tuning.layouts, tuning.settings, strict=True):
        stages = layout.pipeline_parallel
        stage_of = divide_segments(costs, costs.points, stages, LIMIT)
        assert settings == segment_settings(
            costs,
            stage_of,
            stages=stages,
            replicas=4 // stages,
            memory_limit_bytes=LIMIT,
            network=NETWORK,
            schedule=QUICK,
        )
        model = costs.of_stages(stage_of)
        plans = [planner_of(settings, model).plan(each, number) for number, each in enumerate(batches)]
        state = model.tables(tensor_parallel=1, recompute=Recompute.NONE).state
        expected = sum(plan.totals.predicted_ns for plan in plans) / 2 + sum(step_ns(settings, state, StepRates()))
        assert layout.predicted_ms == pytest.approx(expected / 1e6)
        assert layout.layers_per_stage == tuple(stage_of.count(stage) for stage in range(stages))
        assert len(layout.peak_memory_mb) == stages and layout.status is Status.PLANNED


def test_what_cannot_be_used_says_why() -> None:
    tuning = tune_segments(
        costs_of(1, 1), [BATCH], devices=4, memory_limit_bytes=LIMIT, network=NETWORK, schedule=QUICK
    )
    infeasible = tuning.layouts[-1]
    assert (infeasible.pipeline_parallel, infeasible.status) == (4, Status.INFEASIBLE)
    assert infeasible.error is not None and "no division of 2 segments into 4 stages" in infeasible.error
    small = tune_segments(costs_of(1, 1), [BATCH], devices=2, memory_limit_bytes=1000, network=NETWORK)
    assert all(layout.error is not None for layout in small.layouts)
    for batches, devices in (([], 2), ([BATCH], 0)):
        with pytest.raises(ConfigError, match="at least one batch and one device"):
            tune_segments(costs_of(1, 1), batches, devices=devices, memory_limit_bytes=LIMIT)
