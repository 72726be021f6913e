"""Costs that were corrected by what passes take: scaled by virtual stage and half, and nothing else."""

import numpy as np
import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from tests.core.planner_cases import batch, planner, settings

PERCENTS = ((120, 90, 200), (100, 100, 100), (50, 150, 80), (100, 112, 100))
LAYOUTS = (BatchLayout.PADDED, BatchLayout.PACKED)


@pytest.mark.parametrize("split_backward", ["off", "on"])
@pytest.mark.parametrize("family", [ModelFamily.GPT, ModelFamily.T5])
def test_times_of_every_stage_are_scaled_and_memory_stays(family: ModelFamily, split_backward: str) -> None:
    same = {"chunks": 2, "split_backward": split_backward, "micro_batch_layouts": LAYOUTS}
    plain, corrected = (planner(family, **same, corrections=percents) for percents in ((), PERCENTS))
    samples = plain.samples(batch(family, 12))
    rows = [np.arange(3), np.arange(3, 12), np.array([0, 7, 11])]
    layouts = [BatchLayout.PADDED, BatchLayout.PACKED, BatchLayout.PACKED]
    modes = np.array([0, 1, 0])
    (costs, covered), (scaled, still) = (
        made.problem(samples).costs_of(rows, layouts, modes) for made in (plain, corrected)
    )
    assert covered.all() and still.all()
    forward, first, second = np.array(PERCENTS).T / 100
    weight_ns = np.zeros_like(costs.backward_ns) if costs.weight_ns is None else costs.weight_ns
    close = {"rtol": 0, "atol": 2}  # grids of whole numbers are scaled, and then read
    np.testing.assert_allclose(scaled.forward_ns, costs.forward_ns * forward, **close)
    halves = (costs.backward_ns - weight_ns) * first + weight_ns * second
    np.testing.assert_allclose(scaled.backward_ns, halves, **close)
    if split_backward == "on":
        np.testing.assert_allclose(scaled.weight_ns, weight_ns * second, **close)
    assert (scaled.stored_bytes == costs.stored_bytes).all() and (scaled.peak_bytes == costs.peak_bytes).all()


def test_corrections_of_nothing_change_nothing_but_the_digest() -> None:
    plain, corrected = (planner(ModelFamily.GPT, corrections=percents) for percents in ((), ((100,) * 3,) * 2))
    plans = [made.plan(batch(ModelFamily.GPT, 20), 3) for made in (plain, corrected)]
    assert plans[0].replicas == plans[1].replicas and plans[0].settings_digest != plans[1].settings_digest


def test_a_plan_that_knows_a_slow_stage_is_faster_there() -> None:
    """Four stages, of which the second takes half as long again."""
    slow = tuple((150,) * 3 if stage == 1 else (100,) * 3 for stage in range(4))
    four = {"pipeline_parallel": 4, "micro_batch_layouts": LAYOUTS, "split_backward": "auto"}
    unknowing, knowing = (planner(ModelFamily.GPT, **four, corrections=percents) for percents in ((), slow))
    batches = [batch(ModelFamily.GPT, 40, seed=seed) for seed in range(4)]
    times = [sum(truly_ns(made, knowing, each) for each in batches) for made in (unknowing, knowing)]
    assert times[1] < 0.99 * times[0]


def truly_ns(made: Planner, knowing: Planner, of: object) -> int:
    """Time of a planner's passes under the costs that another knows."""
    held, scheduled = made.scheduled(of, forward_only=False, seconds={})
    problem = knowing.problem(held)
    longest = 0
    for rows, schedule in zip(scheduled.replicas, scheduled.schedules, strict=True):
        members = [scheduled.members[row] for row in rows]
        layouts = [scheduled.batch_layouts[row] for row in rows]
        costs, covered = problem.costs_of(members, layouts, scheduled.modes[rows])
        assert covered.all()
        longest = max(longest, simulate(costs, schedule.order).makespan_ns)
    return longest


def test_corrections_are_checked() -> None:
    with pytest.raises(ConfigError, match="corrections of 2 virtual stages, got 1"):
        settings(ModelFamily.GPT, corrections=((100, 100, 100),))
    with pytest.raises(ConfigError, match=r"corrections.*<= 1000"):
        settings(ModelFamily.GPT, corrections=((100, 100, 100), (100, 100, 2000)))
