"""The core's costs are those of the rules in `cost`, and the limit on them is one that no real model meets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import (
    A100_RATES,
    LARGEST_COST,
    AnalyticCostModel,
    CostTables,
    ModelShape,
)
from megatron_dynapipe.ways.rules import verify
from tests.core.partition_oracle import batch_problems
from tests.core.planner_cases import batch, batch_of, cost_model
from tests.core.planner_cases import settings as settings_of
from tests.helpers.examples import examples
from tests.helpers.stage_costs import boundary_bytes, stage_costs


@settings(max_examples=examples(200))
@given(batch_problems(), st.data())
def test_costs_follow_the_rules(problem: BatchProblem, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    longest = [9, 70, 70 if problem.targets.any() else 0]
    shapes = np.array([[data.draw(st.integers(min(n, 1), n)) for n in longest] for _ in range(count)])
    modes = np.array([data.draw(st.integers(0, len(problem.modes) - 1)) for _ in range(count)])
    found, covered = problem.costs(shapes, modes)
    for row, (shape, mode) in enumerate(zip(shapes, modes, strict=True)):
        query = [np.array([n]) for n in shape]
        expected = stage_costs(problem.modes[mode], problem.layout, *query)
        assert covered[row] == expected.feasible[0]
        if not covered[row]:
            continue
        for name in ("forward_ns", "backward_ns", "stored_bytes", "peak_bytes"):
            assert getattr(found, name)[row].tolist() == getattr(expected, name)[0].tolist()
        down, up = map(problem.links.transfer_ns, boundary_bytes(problem.layout, 1, *query, problem.bytes_per_position))
        assert found.forward_transfer_ns[row].tolist() == [*down[0], 0]
        assert found.backward_transfer_ns[row].tolist() == [0, *up[0]]


@settings(max_examples=examples(100))
@given(batch_problems(), st.data())
def test_a_stage_costs_what_it_does_under_its_own_mode(problem: BatchProblem, data: st.DataObject) -> None:
    """The search's costs are these, too: a plan whose times differ is refused."""
    samples, stages = len(problem.inputs), problem.layout.virtual_stages
    each = st.integers(0, len(problem.modes) - 1)
    members = [np.unique(data.draw(st.lists(st.integers(0, samples - 1), min_size=1))) for _ in range(3)]
    layouts = [data.draw(st.sampled_from(problem.batch_layouts)) for _ in members]
    modes = np.array([data.draw(st.lists(each, min_size=stages, max_size=stages)) for _ in members])
    mixed, covered = problem.costs_of(members, layouts, modes)
    under = [problem.costs_of(members, layouts, np.full(3, mode)) for mode in range(len(problem.modes))]
    assert covered.tolist() == [all(under[mode][1][row] for mode in modes[row]) for row in range(3)]
    for at in ((row, stage) for row in np.flatnonzero(covered) for stage in range(stages)):
        costs = zip(mixed.cost_arrays, under[modes[at]][0].cost_arrays, strict=True)
        assert all(array[at] == alone[at] for array, alone in costs)


def test_ninety_six_layers_on_one_stage_are_planned() -> None:
    gpt = ModelFamily.GPT
    costs = cost_model(gpt, hidden=12288, heads=96, vocabulary=50304, rates=A100_RATES)
    sizes = {"encoder_layers": 96, "hidden_size": 12288, "tensor_parallel": 8, "pipeline_parallel": 1}
    plan = planner_of(settings_of(gpt, memory_limit_bytes=10**13, **sizes), costs).plan(batch(gpt, 20), 0)
    verify(plan, expected_samples=range(100, 120))


class _Slow(AnalyticCostModel):
    """A layer's forward takes a third of the limit."""

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        tables = super().tables(tensor_parallel=tensor_parallel, recompute=recompute)
        forward = tables.values[:2, 0].sum(axis=0)
        tables.values[0, 0][forward >= 0] = LARGEST_COST // 3
        tables.values[1, 0] = np.minimum(tables.values[1, 0], 0)
        return tables


def test_a_stage_above_the_limit_is_named_with_the_shape_and_a_remedy() -> None:
    shape = ModelShape(family=ModelFamily.GPT, hidden=64, heads=4, kv_channels=16, ffn=128, vocabulary=512)
    split = {"encoder_layers": 6, "hidden_size": 64, "layers_per_stage": (2, 4)}
    options = settings_of(ModelFamily.GPT, memory_limit_bytes=10**12, **split)
    planner = planner_of(options, _Slow(shape, A100_RATES))
    message = r"sample 0 of padded shape 1x24 takes over 73 minutes or 4\.4 TB on stage 1, which has 4 layers"
    with pytest.raises(InfeasibleError, match=message) as caught:
        planner.plan(batch_of((20, 0)), 0)
    assert "more pipeline stages" in str(caught.value)
