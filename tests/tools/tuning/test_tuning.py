"""The search over layouts: the exhaustive search's answer, with fewer plans; what cannot be used says why."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.costs import ATTENTION, DECODER_ATTENTION, DECODER_MLP, HEAD, MLP
from megatron_dynapipe.core.errors import ConfigError, DynaPipeError, InfeasibleError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import (
    ABSENT,
    CPU_RATES,
    CostTables,
    ModelState,
    Network,
    PipelineLayout,
    Quantity,
    TableCostModel,
    model_of_layers,
)
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning import Space, tune
from megatron_dynapipe.tools.tuning.bounds import LeastWork, even_work_layer_split, least_ns, least_work
from megatron_dynapipe.tools.tuning.evaluate import StepRates, step_ns
from megatron_dynapipe.tools.tuning.space import SplitMethod, Status, Tuning, candidates, divisions
from tests.core.planner_cases import batch, cost_model, of_lengths
from tests.helpers.benchmark_data import A100_COSTS, flan_like_batches
from tests.helpers.examples import examples
from tests.helpers.settings import settings_in_layers
from tests.helpers.stage_costs import GPT_KINDS

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
BOTH = tuple(BatchLayout)
RATES = StepRates(memory_bytes_per_second=CPU_RATES.bytes_per_second)


def base(family: ModelFamily, **changes: Any) -> PlannerSettings:
    given = {
        "encoder_layers": 4,
        "decoder_layers": 4 if family is T5 else 0,
        "memory_limit_bytes": 2 * 10**9,
        "network": Network(devices_per_node=4),
        "schedule": ScheduleSettings(search_evaluations=30),
    }
    return settings_in_layers(family, hidden_size=128, **(given | changes))


def exhaustive(family: ModelFamily, batches: list[GlobalBatch], space: Space, **changes: Any) -> list[float]:
    """Milliseconds of every layout that can be planned, the best first, each planned without any pruning."""
    costs, found = cost_model(family), {}
    for candidate in candidates(base(family, **changes), space, costs):
        wanted = candidate.settings
        if candidate.error is not None:
            continue
        if candidate.split is SplitMethod.EVEN:
            split = even_work_layer_split(wanted, [least_work(wanted, costs, each) for each in batches])
            wanted = wanted.with_layers_per_stage(split)
        try:
            planner = planner_of(wanted, costs)
            ns = sum(planner.plan(each, at).totals.predicted_ns for at, each in enumerate(batches))
        except DynaPipeError:
            continue
        state = costs.tables(tensor_parallel=wanted.tensor_parallel, recompute=wanted.recompute[0]).state
        found[wanted] = (ns / len(batches) + sum(step_ns(wanted, state, RATES))) / 1e6
    return sorted(found.values())


@pytest.mark.parametrize("family", [GPT, T5])
@pytest.mark.parametrize("layouts", [(BatchLayout.PADDED,), BOTH])
@pytest.mark.parametrize("memory_mb", [2000, 20])
def test_the_best_are_those_of_the_exhaustive_search(family, layouts, memory_mb):
    batches = [batch(family, 12, seed=seed) for seed in range(2)]
    space = Space(devices=4, chunks=(1, 2))
    changes = {"micro_batch_layouts": layouts, "memory_limit_bytes": memory_mb * 10**6}
    best = exhaustive(family, batches, space, **changes)
    tuning = tune(base(family, **changes), cost_model(family), batches, space, rates=RATES, top=3)
    times = [layout.predicted_ms for layout in tuning.layouts if layout.status is Status.PLANNED]
    assert times[:3] == pytest.approx(best[:3])
    assert tuning.plans <= 2 * len(best) + sum(layout.status is Status.INFEASIBLE for layout in tuning.layouts)


def test_pruning_saves_plans_and_keeps_every_layout_in_the_answer() -> None:
    batches = [batch(GPT, 40, seed=seed) for seed in range(3)]
    network = Network(devices_per_node=4, inter_node_gbps=0.5)
    tuning = tune(base(GPT, network=network), cost_model(GPT), batches, Space(devices=8), rates=RATES, top=1)
    feasible = [layout for layout in tuning.layouts if layout.status is not Status.INFEASIBLE]
    assert tuning.plans < len(feasible) * len(batches)
    assert any(layout.status is Status.PRUNED for layout in tuning.layouts)
    best = tuning.layouts[0].predicted_ms
    assert best is not None
    assert all(layout.bound_ms is not None and layout.bound_ms >= best for layout in feasible[1:])
    planned = {(each.data_parallel, each.tensor_parallel, each.pipeline_parallel) for each in tuning.layouts}
    assert planned == set(divisions(8))


def test_processes_find_what_one_process_finds() -> None:
    batches = [batch(GPT, 12, seed=seed) for seed in range(2)]
    alone, together = (
        tune(base(GPT), cost_model(GPT), batches, Space(devices=4), rates=RATES, top=2, workers=workers)
        for workers in (1, 2)
    )
    assert alone.layouts[:2] == together.layouts[:2]


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 10**6),
    family=st.sampled_from([GPT, T5]),
    layouts=st.sampled_from([(BatchLayout.PADDED,), (BatchLayout.PACKED,), BOTH]),
    layout=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2), (1, 1, 2)]),
    chunks=st.sampled_from([1, 2]),
    latency_us=st.sampled_from([0.0, 300.0]),
    labelled=st.booleans(),
)
def test_no_plan_is_faster_than_its_bound(seed, family, layouts, layout, chunks, latency_us, labelled):
    data, tensor, pipeline = layout
    wanted = base(
        family,
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        chunks=chunks if pipeline == 2 else 1,
        micro_batch_layouts=layouts,
        network=Network(intra_node_latency_us=latency_us),
    )
    costs, one = cost_model(family), batch(family, 9, seed=seed)
    if labelled and family is GPT:
        one = replace(one, labels=one.input_lengths // 10)
    planned = planner_of(wanted, costs).plan(one, 0).totals.predicted_ns
    work = least_work(wanted, costs, one)
    assert 0 < least_ns(wanted, work) <= planned
    assert least_ns(wanted, work, any_split=True) <= planned


class Uneven:
    """Costs that neither rise with size nor with length, and of which some are absent: whatever was measured."""

    name, digest, hidden_size, family = "uneven", "0", None, GPT

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._values = random.integers(1, 10**6, (len(GPT_KINDS), len(Quantity), 4, 3, 1))
        self._values[:, [Quantity.STORED, Quantity.PEAK, Quantity.ENTRY_STORED, Quantity.ENTRY_PEAK]] = 500
        self._values[:, :, random.random((4, 3, 1)) < 0.1] = ABSENT

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        return CostTables(
            kinds=GPT_KINDS,
            sizes=np.array([1, 2, 4, 8]),
            inputs=np.array([8, 64, 512]),
            targets=np.zeros(1, np.int64),
            values=self._values,
            state=ModelState(embedding_bytes=0, modules={ATTENTION: 400, MLP: 600}),
        )


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(2, 500), min_size=2, max_size=7),
    layouts=st.sampled_from([(BatchLayout.PADDED,), (BatchLayout.PACKED,), BOTH]),
    layout=st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)]),
)
def test_bounds_hold_whatever_was_measured(seed, lengths, layouts, layout):
    data, pipeline = layout
    wanted = base(GPT, data_parallel=data, pipeline_parallel=pipeline, micro_batch_layouts=layouts)
    costs, one = Uneven(seed), of_lengths(lengths)
    try:
        planned = planner_of(wanted, costs).plan(one, 0).totals.predicted_ns
    except InfeasibleError:
        return
    assert least_ns(wanted, least_work(wanted, costs, one)) <= planned


@pytest.mark.parametrize(
    ("seed", "lengths", "said"),
    [
        (5, [300, 442, 419], "sample 0 of padded shape 1x304 has no costs"),
        (30, [31, 410, 467, 275], "sample 1 of padded shape 1x416 has no costs"),
    ],
)
def test_sizes_that_were_not_measured_are_no_bug_of_the_planner(seed: int, lengths: list[int], said: str) -> None:
    """Fewer micro-batches than replicas, and nothing known of a half of one."""
    with pytest.raises(InfeasibleError, match=said):
        planner_of(base(GPT, data_parallel=2, pipeline_parallel=1), Uneven(seed)).plan(of_lengths(lengths), 0)


class Divided(Uneven):
    """Costs of one division into stages."""

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        tables = super().tables(tensor_parallel=tensor_parallel, recompute=recompute)
        return replace(tables, kinds=("stage 0", "stage 1", HEAD))


def test_costs_and_batches_that_leave_no_layout() -> None:
    (layout,) = tune(base(GPT), Divided(0), [batch(GPT, 4)], Space(devices=1)).layouts
    assert (
        layout.error == "costs of one division into stages do not tell the costs of another: give the costs of layers"
    )
    (layout,) = tune(base(GPT), cost_model(GPT), [batch(GPT, 4), of_lengths([9, 5000])], Space(devices=1)).layouts
    assert layout.status is Status.INFEASIBLE and str(layout.error).startswith("batch 1: ")


@pytest.mark.parametrize("family", [GPT, T5])
@pytest.mark.parametrize("layout", [(1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 2, 4)])
def test_bounds_hold_and_tell_something_with_measured_costs(family: ModelFamily, layout: tuple[int, int, int]) -> None:
    recorded = flan_like_batches()[f"{family}-s1024-t65536-b0"]
    one = of_lengths(recorded["input"], recorded.get("target"))
    layers = {"encoder_layers": 32} if family is GPT else {"encoder_layers": 24, "decoder_layers": 24}
    data, tensor, pipeline = layout
    wanted = settings_in_layers(
        family,
        hidden_size=4096 if family is GPT else 1024,
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        memory_limit_bytes=200_000 * 10**6,
        micro_batch_layouts=BOTH,
        schedule=ScheduleSettings(search_evaluations=20),
        **layers,
    )
    costs = TableCostModel.load(A100_COSTS[family])
    planned = planner_of(wanted, costs).plan(one, 0).totals.predicted_ns
    bound = least_ns(wanted, least_work(wanted, costs, one))
    assert 0.5 * planned < bound <= planned


def test_layouts_that_cannot_be_used_say_why() -> None:
    space = Space(devices=24, global_batch_size=16)
    tuning = tune(base(GPT, memory_limit_bytes=4 * 10**6), cost_model(GPT), [batch(GPT, 16)], space)
    errors = {
        (each.data_parallel, each.tensor_parallel, each.pipeline_parallel): each.error
        for each in tuning.layouts
        if each.error
    }
    assert errors[4, 6, 1] == "tensor parallelism of 6 does not divide a node's 4 devices"
    assert errors[3, 1, 8] == "3 replicas do not divide global batches of 16 samples"
    assert errors[1, 1, 24] == "4 layers cannot be split over 24 stages"
    assert "needs" in str(errors[8, 1, 3]) and "optimizer state" in str(errors[8, 1, 3])
    heads = candidates(base(GPT, network=Network()), Space(devices=8), cost_model(GPT))
    assert heads[-1].error == "tensor parallelism must divide the 4 attention heads, got 8"


def test_an_interrupted_search_has_what_was_planned() -> None:
    def interrupt(plans: int, most: int, best_ms: float | None) -> None:
        assert plans <= most
        if best_ms is not None:
            raise KeyboardInterrupt

    batches = [batch(GPT, 12, seed=seed) for seed in range(2)]
    tuning = tune(base(GPT), cost_model(GPT), batches, Space(devices=4), rates=RATES, progress=interrupt)
    assert tuning.interrupted
    assert tuning.layouts[0].status is Status.PLANNED and tuning.layouts[0].predicted_ms


def test_the_choice_of_training_can_be_tried() -> None:
    space = Space(devices=2, splits=(SplitMethod.AUTO,))
    tuning: Tuning = tune(base(T5), cost_model(T5), [batch(T5, 12)], space, rates=RATES, top=9)
    (staged,) = [each for each in tuning.layouts if each.pipeline_parallel == 2]
    assert staged.status is Status.PLANNED and sum(staged.layers_per_stage or ()) == 8
    chunked = Space(devices=2, splits=(SplitMethod.AUTO,), chunks=(2,))
    tuning = tune(base(GPT), cost_model(GPT), [batch(GPT, 12)], chunked, rates=RATES, top=9)
    (staged,) = [each for each in tuning.layouts if each.pipeline_parallel == 2]
    assert staged.status is Status.PLANNED and len(staged.layers_per_stage or ()) == 4


def test_the_even_split_has_the_least_work_on_its_busiest_stage() -> None:
    kinds = (ATTENTION, MLP, DECODER_ATTENTION, DECODER_MLP, HEAD)
    total = np.array([1.5, 0.5, 3.0, 2.0, 7.0])
    work = LeastWork(kinds=kinds, samples=np.zeros((1, 5)), total=total, floor=np.zeros(5))
    wanted = base(T5, pipeline_parallel=3, layers_per_stage=(3, 3, 2))
    found = even_work_layer_split(wanted, [work])

    def busiest(split: tuple[int, ...]) -> float:
        layout = PipelineLayout.of_layers(model_of_layers(T5, 4, 4), split)
        return float((work.total @ layout.counts(work.kinds).T).max())

    splits = [(a, b, 8 - a - b) for a in range(1, 7) for b in range(1, 8 - a)]
    assert busiest(found) == min(map(busiest, splits)) == 13


LAYER = ModelState(embedding_bytes=4000, modules={ATTENTION: 2000})
"""2,000 parameters in the embedding, 1,000 in a layer."""
GBPS = Network(devices_per_node=8, intra_node_gbps=8, inter_node_gbps=4, inter_node_latency_us=1)
"""1 byte a nanosecond inside a node, half of it between nodes."""


@pytest.mark.parametrize(
    ("layout", "sharded", "reduction_ns", "optimizer_ns"),
    [
        ((1, 1, 2), False, 0, 4000 * 30),  # 2 layers and the embedding; nobody to reduce with
        ((4, 1, 2), False, 2 * 3 * 4000, 4000 * 30),  # 16,000 bytes in a ring of 4: 6 steps of a fourth
        ((4, 1, 2), True, 3 * 6000, 1000 * 30),  # 4 bytes back and 2 forth of each: half a ring of 24,000 bytes
        ((16, 1, 2), False, 2 * 7 * 2000 + 2 * (1000 * 2 + 1000), 4000 * 30),  # 8 in a node, then 2 nodes
        ((2, 8, 2), False, 2 * (8000 * 2 + 1000), 4000 * 30),  # one of a node
    ],
)
def test_reduction_and_step(layout, sharded, reduction_ns, optimizer_ns) -> None:
    sizes = dict(zip(("data_parallel", "tensor_parallel", "pipeline_parallel"), layout, strict=True))
    wanted = base(GPT, distributed_optimizer=sharded, network=GBPS, **sizes)
    assert step_ns(wanted, LAYER, StepRates(memory_bytes_per_second=1e9)) == (reduction_ns, optimizer_ns)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tune(base(GPT), cost_model(GPT), [], Space(devices=1)), "at least one batch, best layout and process"),
        (lambda: tune(base(GPT), cost_model(GPT), [batch(GPT, 4)], Space(devices=1), top=0), "best layout and process"),
        (lambda: tune(base(GPT), cost_model(GPT), [batch(GPT, 4)], Space(devices=1), workers=0), "layout and process"),
        (lambda: Space(devices=0), "at least one device, got 0"),
        (lambda: Space(devices=1, chunks=(0,)), "numbers of chunks"),
        (lambda: StepRates(gradient_bytes=0), "gradients of at least 1 byte"),
    ],
    ids=range(6),
)
def test_what_cannot_be_tuned(make, said) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
