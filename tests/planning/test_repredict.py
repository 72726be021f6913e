"""Plans under other costs than their own."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.cost import CPU_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.repredict import repredicted_ns
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout, ModelFamily
from tests.planning.planner_cases import of_lengths

SHAPE = ModelShape(family=ModelFamily.T5, hidden=128, heads=4, kv_channels=32, ffn=512, vocabulary=4096)
LAYOUTS = [(BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)]


def planner(rate: float = 1.0, **changes: object) -> Planner:
    """For costs of a device so many times as fast."""
    rates = msgspec.structs.replace(CPU_RATES, **{
        name: getattr(CPU_RATES, name) * rate for name in ("flops_per_second", "bytes_per_second")
    })  # fmt: skip
    settings = PlannerSettings(
        family=ModelFamily.T5, encoder_layers=4, decoder_layers=4, hidden_size=128, data_parallel=2, tensor_parallel=1,
        pipeline_parallel=2, memory_limit_bytes=2 * 10**9, **changes,
    )  # fmt: skip
    return Planner(settings, AnalyticCostModel(SHAPE, rates, max_size=64, max_length=512))


def batch(samples: int = 24) -> GlobalBatch:
    draw = np.random.default_rng(5)
    return of_lengths(draw.integers(2, 300, samples), draw.integers(2, 80, samples), first=100)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_by_its_own_costs_a_plan_takes_what_it_predicts(layouts: tuple[BatchLayout, ...]) -> None:
    own = planner(micro_batch_layouts=layouts)
    plan = own.plan(batch(), 0)
    assert repredicted_ns(plan, batch(), own) == plan.totals.predicted_ns


def test_by_other_costs_it_takes_no_less_than_a_plan_of_theirs_within_the_search() -> None:
    slow, fast = planner(0.1), planner(10)
    plan = fast.plan(batch(), 0)
    found = repredicted_ns(plan, batch(), slow)
    assert found is not None and found > plan.totals.predicted_ns
    assert found >= slow.plan(batch(), 0).totals.predicted_ns * 0.98


def test_costs_that_do_not_reach_so_far_say_nothing() -> None:
    plan = planner().plan(batch(), 0)
    settings = planner().settings
    small = Planner(settings, AnalyticCostModel(SHAPE, CPU_RATES, max_size=64, max_length=64))
    assert repredicted_ns(plan, batch(), small) is None
