"""Bounds that no plan can beat, against the best order of passes that there is, and against plans of all kinds."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.planning.limits import least_around, least_of, limits
from benchmarks.planning.optimum import best_makespan
from megatron_dynapipe.choosing.planners import planner_of, planner_over
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, ModelShape, even_layer_split
from megatron_dynapipe.costing.adapters import Adapters
from tests.core.planner_cases import batch_of, of_padded_costs, planner
from tests.helpers.examples import examples
from tests.helpers.settings import settings_in_layers


def test_frozen_weights_take_no_room_of_gradients_in_the_bound_of_memory() -> None:
    """A model whose weights fit two devices beside adapters, and would not with gradients and an optimizer."""
    shape = ModelShape(
        family=ModelFamily.GPT, hidden=2048, heads=16, kv_channels=128, ffn=8192, vocabulary=512, adapters=Adapters()
    )
    memory = {"pipeline_parallel": 2, "memory_limit_bytes": 900_000_000}
    made = planner_of(
        settings_in_layers(ModelFamily.GPT, 8, hidden_size=2048, **memory), AnalyticCostModel(shape, A100_RATES)
    )
    samples = batch_of(*[(n, 0) for n in (900, 600, 400, 300, 120, 70, 30, 800)])
    plan = made.plan(samples, 0)
    ladder = [*limits(made, samples), least_of(made, plan), plan.totals.predicted_ns]
    assert all(below <= above for below, above in pairwise(ladder)), ladder


@given(
    family=st.sampled_from(ModelFamily),
    pairs=st.lists(st.tuples(st.integers(2, 900), st.integers(1, 200)), min_size=2, max_size=12),
    stages=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 1, 2]),
    halves=st.booleans(),
    replicas=st.integers(1, 2),
    memory=st.sampled_from([2 * 10**9, 6 * 10**7, 3 * 10**7]),
    split=st.sampled_from(["off", "auto"]),
    slices=st.sampled_from(["off", "auto"]),
    layouts=st.sampled_from([(BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)]),
    counting=st.sampled_from([None, 0, 0.1]),
    derived=st.booleans(),
)
@settings(max_examples=examples(40))
def test_no_plan_is_faster_than_its_limits(
    family, pairs, stages, chunks, halves, replicas, memory, split, slices, layouts, counting, derived
):
    t5 = family is ModelFamily.T5
    changes = {"split_backward": split, "micro_batch_layouts": layouts, "slices": "off" if t5 else slices}
    changes |= {"pipeline_parallel": stages, "data_parallel": replicas, "memory_limit_bytes": memory}
    if stages > 1:
        layers = [int(2 * n) for n in even_layer_split(8 if t5 else 4, stages * chunks, halves=True)]
        moved = int(halves and layers[-1] > 1)
        changes |= {
            "chunks": chunks,
            "layers_per_stage": tuple(n / 2 for n in (layers[0] + moved, *layers[1:-1], layers[-1] - moved)),
        }
    lengths = batch_of(*[(first, second * t5) for first, second in pairs])
    if counting is not None and not t5:
        lengths = replace(lengths, labels=(lengths.input_lengths * counting).astype(np.int32))
    try:
        made = planner(family, **changes)
        made = of_padded_costs(made) if derived else made
        plan = made.plan(lengths, 0)
    except InfeasibleError:
        return
    bounds = limits(made, lengths)
    ladder = [*bounds, max(bounds.split, least_of(made, plan)), plan.totals.predicted_ns]
    assert all(below <= above for below, above in pairwise(ladder)), ladder


@pytest.mark.parametrize("divided", ["off", "auto"])
def test_a_long_sample_that_is_not_cut_bounds_plans_by_its_way_through_all_stages(divided) -> None:
    made = planner(ModelFamily.GPT, encoder_layers=8, pipeline_parallel=4, slices="off", split_backward=divided)
    samples = batch_of((900, 0), (30, 0))
    plan = made.plan(samples, 0)
    bounds = limits(made, samples)
    assert 2 * bounds.devices < bounds.stages <= plan.totals.predicted_ns
    assert bounds.stages > 0.8 * plan.totals.predicted_ns


@pytest.mark.parametrize(("stages", "lengths"), [(2, (500, 300, 200)), (3, (400, 400, 100)), (2, (800, 90, 90, 80))])
def test_the_best_order_of_a_plans_micro_batches_lies_between_its_limit_and_the_plan(stages, lengths) -> None:
    """Whole passes: the limit counts a drain, and the search comes within 2% of the optimum."""
    made = planner(
        ModelFamily.GPT, encoder_layers=6, pipeline_parallel=stages, recompute=(Recompute.NONE,), slices="off"
    )
    samples = batch_of(*[(n, 0) for n in lengths])
    plan = made.plan(samples, 0)
    problem = made.problem(Samples.of(samples, ModelFamily.GPT))
    (replica,) = plan.replicas
    rows = [np.array(batch.sample_ids) for batch in replica.micro_batches]
    layouts = [batch.layout for batch in replica.micro_batches]
    costs, _ = problem.costs_of(rows, layouts, np.zeros(len(rows), np.int64))
    optimum = best_makespan(costs)
    assert least_of(made, plan) <= optimum <= plan.totals.predicted_ns <= optimum * 1.02


@given(
    st.integers(2, 3).flatmap(
        lambda stages: st.lists(
            st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=stages, max_size=stages),
            min_size=2,
            max_size=3,
        )
    )
)
@settings(max_examples=examples(60))
@example([[(1, 30), (10, 10)], [(30, 1), (10, 10)]])
def test_no_order_of_rows_is_faster_than_the_least_way_there_and_back(rows) -> None:
    """The row that comes to a stage first need not leave it last: the sum of one row's ways was no bound."""
    forward, backward = np.moveaxis(np.array(rows, np.int64), -1, 0)
    nothing = np.zeros_like(forward)
    costs = ScheduleProblem(
        stages=forward.shape[1],
        chunks=1,
        forward_ns=forward,
        backward_ns=backward,
        stored_bytes=nothing,
        peak_bytes=nothing,
        forward_transfer_ns=nothing,
        backward_transfer_ns=nothing,
        weight_ns=nothing,
        forward_message_bytes=nothing,
        backward_message_bytes=nothing,
        model_state_bytes=nothing[0],
        memory_limit_bytes=1,
        forward_only=False,
        peak_covers_backward=False,
    )
    assert least_around((forward + backward).sum(axis=0), forward, backward) <= best_makespan(costs)


def test_a_row_of_a_short_sample_that_is_rounded_up_costs_less_than_the_sample_padded() -> None:
    """Two positions are a quarter of a row of eight; where four samples take as long as one, so is their time."""
    made = planner(ModelFamily.GPT, micro_batch_layouts=(BatchLayout.PACKED,), pipeline_parallel=4, slices="off")
    tables = []
    for under_mode in made.tables:
        values = np.ascontiguousarray(np.broadcast_to(under_mode.values[:, :, :1], under_mode.values.shape))
        tables.append(replace(under_mode, values=values, separate=None, packed=None))
    flat = planner_over(made.settings, tables, costs_digest=made.costs_digest)
    samples = batch_of((2, 0))
    plan = flat.plan(samples, 0)
    assert limits(flat, samples).stages <= plan.totals.predicted_ns
