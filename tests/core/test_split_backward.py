"""Plans with divided backward passes: where they are, what they gain, and that nothing else changes without them."""

import msgspec
import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Forward
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, TableCostModel
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import cost_model, of_lengths
from tests.helpers.benchmark_data import A100_COSTS, flan_like_batches
from tests.helpers.settings import settings_in_layers

COSTS = cost_model(ModelFamily.GPT, hidden=1024, heads=16, vocabulary=32768, rates=A100_RATES, max_size=64)
LENGTHS = [40 + 37 * i % 700 for i in range(48)]


def plan(split_backward="auto", *, forward_only=False, **changes):
    settings = settings_in_layers(
        ModelFamily.GPT,
        8,
        hidden_size=1024,
        memory_limit_bytes=changes.pop("memory_limit_bytes", 4 * 10**9),
        split_backward=split_backward,
        **({"pipeline_parallel": 4} | changes),
    )
    return planner_of(settings, COSTS).plan(of_lengths(LENGTHS), 0, forward_only=forward_only)


def passes(planned, kind):
    lists = (stage.instructions for replica in planned.replicas for stage in replica.stages)
    return [(i.micro_batch, i.chunk) for instructions in lists for i in instructions if isinstance(i, kind)]


@pytest.mark.parametrize("changes", [{}, {"pipeline_parallel": 2, "chunks": 2}, {"data_parallel": 2}])
def test_auto_divides_some_passes_and_gains(changes):
    whole, found = plan("off", **changes), plan(**changes)
    assert not passes(whole, BackwardInput)
    assert sorted(passes(found, BackwardInput)) == sorted(passes(found, BackwardWeight)) != []
    assert passes(found, Backward), "those that gain nothing stay whole"
    assert max(r.predicted_ns for r in found.replicas) < max(r.predicted_ns for r in whole.replicas)
    assert plan(**changes) == found


def test_a_plan_that_division_gains_nothing_is_searched_without_it_too():
    batch = flan_like_batches()["t5-s1024-t65536-b1"]  # which memory limits
    settings = settings_in_layers(
        ModelFamily.T5, 24, 24, hidden_size=1024, memory_limit_bytes=36 * 10**9,
        data_parallel=2, tensor_parallel=2, pipeline_parallel=2, distributed_optimizer=True,
        micro_batch_layouts=tuple(BatchLayout), split_backward="off",
    )  # fmt: skip
    of = of_lengths(batch["input"], batch["target"])
    costs = TableCostModel.load(A100_COSTS["t5"])
    whole, found = (
        planner_of(msgspec.structs.replace(settings, split_backward=how), costs).plan(of, 0) for how in ("off", "auto")
    )
    assert found.totals.predicted_ns <= whole.totals.predicted_ns


def test_on_divides_all_that_can_be():
    found = plan("on", pipeline_parallel=1, recompute=(Recompute.NONE, Recompute.SELECTIVE))
    assert not passes(found, Backward)
    assert len(passes(found, BackwardInput)) == len(passes(found, Forward))
    assert not passes(plan("auto", pipeline_parallel=1), BackwardInput)


def test_full_recomputation_and_evaluations_stay_whole():
    assert not passes(plan("on", recompute=(Recompute.FULL,)), BackwardInput)
    assert not passes(plan("on", forward_only=True), BackwardInput)
    found = plan("on", recompute=(Recompute.NONE,))
    (replica,) = found.replicas
    modes = (Recompute.NONE, Recompute.FULL) * 2
    full = tuple(msgspec.structs.replace(batch, recompute=modes) for batch in replica.micro_batches)
    with pytest.raises(PlanError, match="expected the whole backward pass of a micro-batch that is recomputed in full"):
        verify(msgspec.structs.replace(found, replicas=(msgspec.structs.replace(replica, micro_batches=full),)))
