"""Patterns of modules: what they say of layers and stages, what is refused, what a module that is a layer costs."""

import json

import pytest

from megatron_dynapipe.choosing.planners import planner_of, tables_of
from megatron_dynapipe.core.costs import ATTENTION, EXPERT_MLP, MLP
from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import (
    CPU_RATES,
    AnalyticCostModel,
    ModelShape,
    PipelineLayout,
    Quantity,
    TableCostModel,
    model_of_layers,
)
from megatron_dynapipe.costing.pattern import (
    check_stages,
    expert_modules,
    kinds_of_pattern,
    layer_split_of_pattern,
    pattern_of,
    with_stages,
)
from tests.cli.conftest import cost_model
from tests.core.planner_cases import batch
from tests.helpers.settings import settings_in_layers

GPT = ModelFamily.GPT
READ = {
    # pattern: kinds, modules with experts beside others, split
    "*-*-": ((ATTENTION, MLP, ATTENTION, MLP), (), None),
    "*-|*E": ((ATTENTION, MLP, ATTENTION, EXPERT_MLP), (3,), (2, 2)),
    "+-|+-": ((ATTENTION, MLP, ATTENTION, MLP), (), (2, 2)),
    "*E*|E": ((ATTENTION, MLP, ATTENTION, MLP), (), (3, 1)),
    "|*--||E*": ((ATTENTION, MLP, MLP, EXPERT_MLP, ATTENTION), (3,), (0, 3, 0, 2)),
}
REFUSED = {
    "*M-": "'M' at position 2 stands for Mamba layers, whose costs are not known",
    "*-|G": "'G' at position 4 stands for gated delta nets",
    "D-": "'D' at position 1 stands for sparse attention",
    "*-/*-": "'/' at position 3 stands for layers that predict several tokens",
    "*-x": "'x' at position 3 is no symbol of a layer",
    "|": "'|': expected a layer, got none",
}
STAGES = {
    # pattern, stages, the other flag's split: what is said
    ("*-|*-", 2, None): "",
    ("*-|*-", 2, (2, 2)): "",
    ("*|-|*|-", 2, (1, 1, 1, 1)): "",
    ("*-|*-", 4, None): "expected segments for 4 pipeline stages, as many on each, got 2, the last from position 4",
    ("*|-|*-", 2, None): "got 3, the last from position 5",
    ("|*-*|", 3, None): "",
    ("*-||*", 3, None): "expected a layer between | and | at position 3, got none",
    ("*-|*-", 2, (1, 3)): "expected the stages of --dynapipe-layers-per-stage 1,3, got | at position 3",
    ("*-*-|*-", 2, (4, 1, 1)): "--dynapipe-layers-per-stage 4,1,1, got no | at position 7",
}


@pytest.mark.parametrize(("pattern", "expected"), READ.items())
def test_a_pattern_is_read_and_written(pattern, expected):
    kinds, _, split = expected
    assert (kinds_of_pattern(pattern), expert_modules(pattern), layer_split_of_pattern(pattern)) == expected
    assert with_stages(pattern.replace("|", ""), split or (len(kinds),)) == pattern


@pytest.mark.parametrize(("pattern", "message"), REFUSED.items())
def test_what_is_no_module_of_planned_runs_is_named_with_its_position(pattern, message):
    with pytest.raises(ConfigError) as raised:
        kinds_of_pattern(pattern)
    assert message in str(raised.value) and "\n" not in raised.value.message


@pytest.mark.parametrize(("case", "message"), STAGES.items())
def test_stages_are_held_against_the_pipeline_and_the_other_flag(case, message):
    pattern, stages, split = case
    said = ""
    try:
        check_stages(pattern, stages=stages, split=split)
    except ConfigError as error:
        said = error.message
    assert message in said and bool(message) == bool(said)


@pytest.mark.parametrize(
    ("split", "expert_layers", "experts", "pattern"),
    [
        ((2, 1), (), False, "*-*-|*-"),
        ((1.5, 0, 1.5), (), False, "*-*||-*-"),
        ((1, 2), (2,), False, "*-|*-*E"),
        ((2.5, 0.5), (), True, "*E*E*|E"),
    ],
)
def test_the_pattern_of_a_gpt(split, expert_layers, experts, pattern):
    layout = PipelineLayout.of_layers(model_of_layers(GPT, 3, expert_layers=expert_layers), split)
    assert pattern_of(layout, experts=experts) == pattern


SHAPE = ModelShape(family=GPT, hidden=64, heads=4, kv_channels=16, ffn=256, vocabulary=1024)


def settings(**changes: object) -> PlannerSettings:
    given = {"hidden_size": 64, "memory_limit_bytes": 10**10, "pipeline_parallel": 2}
    return settings_in_layers(GPT, **(given | changes))


@pytest.mark.parametrize("mode", Recompute)
@pytest.mark.parametrize("split", [(2, 2), (2.5, 1.5), (1, 1, 0.5, 1.5)])
def test_a_gpt_as_a_pattern_has_the_gpt_s_times(mode, split):
    """And memory, but that recomputed in full each module keeps its input."""
    costs = AnalyticCostModel(SHAPE, CPU_RATES, max_size=64, max_length=1024)
    common = {"recompute": (mode,), "chunks": len(split) // 2}
    layers = settings(encoder_layers=4, layers_per_stage=split, **common)
    counts = tuple(int(2 * layers) for layers in split)
    modules = settings(encoder_layers=8, layers_per_stage=counts, pattern="*-" * 4, **common)
    plans = [planner_of(each, costs).plan(batch(GPT, 60), 0) for each in (layers, modules)]
    times = [plan.totals.predicted_ns for plan in plans]
    assert times[1] == pytest.approx(times[0], rel=0.01)
    stored = [[mb.stored_bytes for mb in plan.replicas[0].micro_batches] for plan in plans]
    if mode is not Recompute.FULL:
        assert stored[0] == stored[1]
    else:
        assert sum(map(sum, stored[1])) > sum(map(sum, stored[0]))


def test_an_mlp_after_an_mlp_has_a_peak_of_its_own():
    costs = AnalyticCostModel(SHAPE, CPU_RATES, max_size=64, max_length=1024)
    (tables,) = tables_of(settings(encoder_layers=2, pattern="*-", recompute=(Recompute.FULL,)), costs)
    attention, mlp = (tables.values[tables.kinds.index(kind)] for kind in (ATTENTION, MLP))
    known = (mlp >= 0).all(axis=0)
    assert (mlp[Quantity.STORED][known] == attention[Quantity.STORED][known]).all()
    assert not mlp[Quantity.ENTRY_STORED][known].any() and (mlp[Quantity.PEAK][known] > 0).all()


def test_a_pattern_needs_costs_of_attention_and_mlp_apart():
    costs = TableCostModel.decode(json.dumps(cost_model()).encode())
    pattern = settings(encoder_layers=4, hidden_size=32, pattern="*--*", recompute=(Recompute.NONE,))
    with pytest.raises(CostModelError, match="expected costs of attention and MLP apart, for a pattern of them; tiny"):
        planner_of(pattern, costs)
