"""The bound of how rows fill the stages of a split, against all rows in all orders, and against recorded plans."""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.filling import fastest_filling
from benchmarks.planning.limits import least_of, limits
from benchmarks.planning.optimum import best_makespan
from benchmarks.planning.recorded import CASES, RECORDED, SHAPES, cases
from benchmarks.planning.row_costs import RowCosts
from benchmarks.planning.stage_work import StageWork
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.costs import Quantity
from megatron_dynapipe.core.network import Network
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, CostModel, TableCostModel
from megatron_dynapipe.sampling import GlobalBatch
from tests.core.planner_cases import batch_of, of_padded_costs, planner
from tests.helpers.benchmark_data import BENCHMARKS, flan_like_batches
from tests.helpers.examples import examples

type Rows = tuple[frozenset[int], ...]


def divisions(samples: frozenset[int]) -> Iterator[Rows]:
    """All ways to put samples into rows."""
    if not samples:
        yield ()
        return
    first = min(samples)
    others = sorted(samples - {first})
    for size in range(len(others) + 1):
        for beside in combinations(others, size):
            row = frozenset((first, *beside))
            for rest in divisions(samples - row):
                yield (row, *rest)


def fastest(made: Planner, samples: Samples) -> int:
    """The least time over all rows, replicas and orders of whole passes."""
    problem = made.problem(samples)

    @functools.cache
    def of_replica(held: frozenset[int]) -> int:
        best = 1 << 60
        for rows in divisions(held):
            members = [np.array(sorted(row)) for row in rows]
            layouts = [made.settings.micro_batch_layouts[0]] * len(rows)
            costs, _ = problem.costs_of(members, layouts, np.zeros(len(rows), np.int64))
            best = best_makespan(costs, best)
        return best

    everything = frozenset(range(len(samples.ids)))
    if made.settings.data_parallel == 1:
        return of_replica(everything)
    held = [frozenset(one) for size in range(1, len(everything)) for one in combinations(everything, size)]
    return min(max(of_replica(one), of_replica(everything - one)) for one in held)


@given(
    lengths=st.lists(st.integers(2, 1500), min_size=2, max_size=4),
    split=st.sampled_from([(2, 2), (3, 1), (1.5, 2.5), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1)]),
    replicas=st.sampled_from([1, 1, 2]),
    layout=st.sampled_from(BatchLayout),
    derived=st.booleans(),
    latency_us=st.sampled_from([0, 0, 300]),
)
@settings(max_examples=examples(25))
def test_no_rows_in_any_order_are_faster_than_their_bound(
    lengths, split, replicas, layout, derived, latency_us
) -> None:
    made = planner(
        ModelFamily.GPT,
        layers_per_stage=split,
        pipeline_parallel=len(split),
        data_parallel=replicas,
        micro_batch_layouts=(layout,),
        recompute=(Recompute.NONE,),
        slices="off",
        network=Network(devices_per_node=1, inter_node_gbps=1, inter_node_latency_us=latency_us),
    )
    made = of_padded_costs(made) if derived else made
    samples = made.samples(batch_of(*[(length, 0) for length in lengths]))
    assert fastest_filling(StageWork(made, samples)) <= fastest(made, samples)


@functools.cache
def costs_of(name: str) -> CostModel:
    """The costs of a recorded model."""
    if name in SHAPES:
        return AnalyticCostModel(SHAPES[name], A100_RATES)
    return TableCostModel.load(BENCHMARKS / "data" / f"{name}.gz")


RECORDED_CASES = [case for case in islice(cases(), CASES) if case.settings.pipeline_parallel > 1]


@pytest.mark.parametrize("case", RECORDED_CASES[::12], ids=lambda case: case.name)
def test_no_recorded_plan_is_below_its_bound(case) -> None:
    _, predicted_ns = json.loads(RECORDED.read_text())[case.name]
    lengths = flan_like_batches()[case.batch]
    samples = GlobalBatch.of_lengths(lengths["input"], lengths.get("target") or 0)
    made = planner_of(case.settings, costs_of(case.model.costs))
    assert 0 < fastest_filling(StageWork(made, made.samples(samples))) <= predicted_ns


def test_few_rows_of_many_stages_take_longer_than_their_work_and_the_shortest_fill() -> None:
    """Rows that fill four stages are so short that they run slowly, or so long that stages wait for them."""
    made = planner(
        ModelFamily.GPT,
        encoder_layers=8,
        pipeline_parallel=4,
        micro_batch_layouts=(BatchLayout.PACKED,),
        recompute=(Recompute.NONE,),
        split_backward="auto",
    )
    samples = batch_of(*[(40, 0)] * 40)
    plan = made.plan(samples, 0)
    bounds = limits(made, samples)
    assert 1.2 * bounds.memory < bounds.split <= least_of(made, plan) <= plan.totals.predicted_ns


@given(
    family=st.sampled_from(ModelFamily),
    pairs=st.lists(st.tuples(st.integers(2, 900), st.integers(1, 200)), min_size=1, max_size=8),
    layout=st.sampled_from(BatchLayout),
    derived=st.booleans(),
    positions=st.floats(1, 10_000),
)
@settings(max_examples=examples(60))
def test_a_row_takes_its_samples_shares_and_what_it_pays(family, pairs, layout, derived, positions) -> None:
    made = planner(family, micro_batch_layouts=(layout,), slices="off")
    made = of_padded_costs(made) if derived else made
    samples = made.samples(batch_of(*[(first, second * (family is ModelFamily.T5)) for first, second in pairs]))
    work = StageWork(made, samples)
    row = np.arange(len(pairs))
    modes = range(len(made.tables))
    costs, covered = made.problem(samples).costs_of([row] * len(modes), [layout] * len(modes), np.array(modes))
    held = int((samples.input_positions + samples.target_positions).sum())
    paid = held / (held + work.rounded_up)
    modules = made.layout.counts(made.tables[0].kinds).T
    bounds = [work.counts @ (of[:-1] @ modules) + paid * (of[-1] @ modules) for of in work.of_rows(positions)]
    taken = (costs.forward_ns, costs.backward_ns, costs.forward_ns + costs.backward_ns)
    for bound, times in zip(bounds, taken, strict=True):
        assert (bound - work.rounding <= times[covered]).all()


def test_what_a_row_pays_is_the_highest_at_rows_of_the_length_asked_for() -> None:
    """Short rows of one price, and longer ones by position: a line through the corner, then one through the origin."""
    made = planner(ModelFamily.GPT)
    (tables, *_) = made.tables
    values = np.broadcast_to(np.maximum(tables.inputs, 100)[:, None], tables.values.shape).copy()
    values *= tables.sizes[:, None, None]
    costs = RowCosts(replace(tables, values=values, separate=None, packed=None))
    assert costs.intercept(Quantity.FORWARD, 50) == pytest.approx(100, rel=0.05)
    assert costs.intercept(Quantity.FORWARD, 5000) == pytest.approx(0, abs=1)
