"""The core's costs of packed rows are those of the rule, whatever the tables."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.native import from_codes
from megatron_dynapipe.core.problem import BatchProblem, IntArray, ScheduleProblem
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import ABSENT, PackedTables, Quantity
from megatron_dynapipe.costing.shape import Experts
from tests.core.packed_oracle import derived_costs
from tests.core.partition_oracle import batch_problems
from tests.core.planner_cases import batch, cost_model, planner
from tests.core.planner_cases import settings as settings_of
from tests.helpers.examples import examples
from tests.helpers.packed_costs import packed_costs

PACKED = (BatchLayout.PACKED,)


@st.composite
def packed_problems(draw: st.DrawFn) -> BatchProblem:
    """Problems whose tables lack values row by row, or have packed rows of their own."""
    problem = draw(batch_problems(layouts=PACKED))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    modes = []
    for tables in problem.modes:
        separate = tables.values.copy()
        read = separate[:, : Quantity.WEIGHT]  # what no stage needs is not read
        read[random.random(read.shape) < draw(st.sampled_from([0, 0.2]))] = ABSENT
        packed = None
        if draw(st.booleans()):
            t5 = bool(problem.targets.any())
            axes = [np.array([1, 40, 600]), np.array([1, 90, 600]) if t5 else np.zeros(1, np.int64)]
            longest = draw(st.sampled_from([66, 33]))  # of a sample that was measured
            own = [np.array([1, 30, longest]), np.array([1, longest]) if t5 else np.zeros(1, np.int64)]
            rows = len(tables.kinds), len(Quantity)
            linear, attention = (random.integers(0, 99, (*rows, len(x), len(y))) for x, y in (axes, own))
            packed = PackedTables(
                row_inputs=axes[0],
                row_targets=axes[1],
                linear=linear,
                inputs=own[0],
                targets=own[1],
                attention=attention,
            )
        modes.append(replace(tables, separate=separate, packed=packed))
    return replace(problem, modes=tuple(modes))


@settings(max_examples=examples(150))
@given(packed_problems(), st.data())
def test_the_core_follows_the_rule(problem: BatchProblem, data: st.DataObject) -> None:
    samples = st.lists(st.integers(0, len(problem.inputs) - 1), min_size=1, unique=True)
    members = [np.array(row, np.int64) for row in data.draw(st.lists(samples, min_size=1, max_size=4))]
    modes = np.array([data.draw(st.integers(0, len(problem.modes) - 1)) for _ in members], np.int64)
    costs, covered = problem.costs_of(members, PACKED * len(members), modes)
    for row, (samples_of_row, mode) in enumerate(zip(members, modes, strict=True)):
        lengths = problem.input_positions[samples_of_row], problem.target_positions[samples_of_row]
        expected = packed_costs(problem.modes[mode], *lengths)
        assert covered[row] == (expected is not None)
        if expected is None:
            continue
        both = costs.forward_ns[row] + costs.backward_ns[row]
        times = expected[:, Quantity.FORWARD] + expected[:, Quantity.BACKWARD]
        assert both.tolist() == (problem.layout.counts(problem.modes[mode].kinds) @ times).tolist()


@settings(max_examples=examples(150))
@given(packed_problems(), st.data())
def test_a_row_that_follows_from_another_costs_what_it_costs_alone(problem: BatchProblem, data: st.DataObject) -> None:
    """A search prices rows by what changes: too dear a row would only be refused, so no plan would show it."""
    problem = replace(problem, memory_limit_bytes=2**60)
    sample = st.integers(0, len(problem.inputs) - 1)
    rows = data.draw(st.lists(st.lists(sample, min_size=1, unique=True), min_size=2, max_size=8))
    modes = data.draw(st.lists(st.integers(0, len(problem.modes) - 1), min_size=len(rows), max_size=len(rows)))
    asked = {
        "samples": np.concatenate([np.array(row, np.int64) for row in rows]),
        "sizes": np.array([len(row) for row in rows], np.int64),
        "modes": np.array(modes, np.int64),
    }
    alone, covered = problem.native.packed_costs(**asked)
    followed, fits = problem.native.changed_costs(**asked)
    assert fits == covered
    assert followed.tolist() == alone.tolist()


@settings(max_examples=examples(150))
@given(packed_problems(), st.data())
def test_the_rule_is_that_of_padded_shares(problem: BatchProblem, data: st.DataObject) -> None:
    tables = replace(problem.modes[0], packed=None)
    rows = data.draw(st.lists(st.integers(0, len(problem.inputs) - 1), min_size=1, unique=True))
    lengths = problem.input_positions[rows], problem.target_positions[rows]
    expected = derived_costs(tables, *lengths)
    found = packed_costs(tables, *lengths)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert all(abs(f - e) <= len(rows) + 1 for f, e in zip(found.ravel().tolist(), expected, strict=True))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("split", [(2, 2), (4, 0)], ids=["joined", "head alone"])
def test_the_last_mlp_and_the_head_cost_what_counts(split: tuple[int, int], measured: bool, packed: bool) -> None:
    """All that counts costs what everything does; times lie on a line between that and nothing."""
    gpt = ModelFamily.GPT
    made = planner(gpt, micro_batch_layouts=tuple(BatchLayout), layers_per_stage=split)
    problem = made.problem(made.samples(batch(gpt, 12)))
    if not measured:
        problem = replace(problem, modes=tuple(replace(tables, packed=None) for tables in problem.modes))
    positions = problem.input_positions
    members, layout = [np.arange(12)], BatchLayout.PACKED if packed else BatchLayout.PADDED
    padded = len(positions) * int(problem.inputs.max())

    def costs(labels: IntArray | None) -> ScheduleProblem:
        return replace(problem, labels=labels).costs_of(members, [layout], np.zeros(1, np.int64))[0]

    everything, whole, nothing = costs(None), costs(positions), costs(0 * positions)
    half = costs(positions // 2)
    for name in ("forward_ns", "backward_ns"):
        first, last = getattr(everything, name)[0]
        times = [getattr(problem_of, name)[0] for problem_of in (whole, half, nothing)]
        assert [time[0] for time in times] == [first] * 3, "stages before the last run all positions"
        share = 1 if packed else int(positions.sum()) / padded  # padding never counts
        rest = times[2][1]
        assert times[0][1] == pytest.approx(rest + share * (last - rest), rel=0.05 if measured else 1e-6)
        part = (positions // 2).sum() / positions.sum()
        assert times[1][1] == pytest.approx(rest + part * (times[0][1] - rest), rel=0.02)
        assert rest < 0.8 * last
    assert nothing.stored_bytes[0, 1] < half.stored_bytes[0, 1] < everything.stored_bytes[0, 1], "logits are memory"
    assert nothing.peak_bytes[0, 1] < everything.peak_bytes[0, 1], "of the forward, too"
    if packed:
        assert whole.peak_bytes.tolist() == everything.peak_bytes.tolist()


@pytest.mark.parametrize(
    ("with_experts", "last_has"), [((), True), ((1, 3), True), ((0, 2), False)], ids=["all", "last", "others"]
)
@pytest.mark.parametrize("layout", BatchLayout)
def test_experts_of_the_last_layer_cost_what_counts_where_they_run_that(
    with_experts: tuple[int, ...], last_has: bool, layout: BatchLayout
) -> None:
    """Where their routers look at all positions, labels change the head's costs alone."""
    experts = Experts(count=4, per_token=2, ffn=512, layers=with_experts)
    given = settings_of(ModelFamily.GPT, micro_batch_layouts=tuple(BatchLayout), expert_layers=with_experts)
    made = planner_of(given, cost_model(ModelFamily.GPT, experts=experts))
    problem = made.problem(made.samples(batch(ModelFamily.GPT, 12)))
    positions = problem.input_positions

    def forward_ns(labels: IntArray | None, label_experts: bool) -> IntArray:
        labelled = replace(problem, labels=labels, label_experts=label_experts)
        return labelled.costs_of([np.arange(12)], [layout], np.zeros(1, np.int64))[0].forward_ns[0]

    everything = forward_ns(None, True)
    assert (everything == forward_ns(None, False)).all()
    apart, whole = forward_ns(0 * positions, True), forward_ns(0 * positions, False)
    assert apart[0] == whole[0] == everything[0], "stages before the last run all positions"
    assert whole[1] < 0.95 * everything[1], "the head runs what counts"
    assert apart[1] < 0.95 * whole[1] if last_has else apart[1] == whole[1]
    half = forward_ns(positions // 2, True)
    part = (positions // 2).sum() / positions.sum()
    of_all = forward_ns(positions, True)
    assert half[1] == pytest.approx(apart[1] + part * (of_all[1] - apart[1]), rel=0.05)


def check_times_of_search(problem: BatchProblem, *, evaluations: int, seed: int = 0) -> int:
    """Micro-batches that a search has found; their orders take, at prices from scratch, what it has said."""
    every = np.arange(len(problem.inputs))
    found = problem.native.search(order=every, partitions=[], evaluations=evaluations, seed=seed, following=False)
    stages = problem.layout.stages
    chunks = problem.layout.chunks
    for samples, sizes, modes, packed, passes, time_ns in found:
        members = np.split(np.array(samples, np.int64), np.cumsum(sizes)[:-1])
        layouts = [BatchLayout.PACKED if is_row else BatchLayout.PADDED for is_row in packed]
        costs, covered = problem.costs_of(members, layouts, np.array(modes, np.int64))
        order = from_codes(np.array(passes, np.int64).reshape(stages, -1), chunks)
        assert covered.all()
        assert simulate(costs, order).makespan_ns == time_ns
    return sum(len(sizes) for _, sizes, *_ in found)


@settings(max_examples=60, deadline=None)
@given(packed_problems(), st.integers(0, 9))
def test_rows_that_follow_from_others_are_priced_as_from_scratch(problem: BatchProblem, seed: int) -> None:
    check_times_of_search(problem, evaluations=150, seed=seed)


@pytest.mark.parametrize("labels", [False, True], ids=["all positions", "labels"])
@pytest.mark.parametrize("measured", [False, True], ids=["derived", "measured"])
@pytest.mark.parametrize("changes", [{}, {"data_parallel": 3}, {"chunks": 2}], ids=["", "replicas", "chunks"])
def test_many_moves_leave_prices_as_they_are_from_scratch(
    changes: dict[str, int], measured: bool, labels: bool
) -> None:
    layouts = {"micro_batch_layouts": tuple(BatchLayout), "recompute": tuple(Recompute), "encoder_layers": 8}
    made = planner(ModelFamily.GPT, **layouts, **changes)
    problem = made.problem(made.samples(batch(ModelFamily.GPT, 60)))
    if not measured:
        problem = replace(problem, modes=tuple(replace(tables, packed=None) for tables in problem.modes))
    if labels:
        problem = replace(problem, labels=problem.input_positions // 3)
    assert check_times_of_search(problem, evaluations=2000) > 1
