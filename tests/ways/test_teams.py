"""Teams: what the verifier says where members differ, and what a plan's numbers count once."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of, planner_over
from megatron_dynapipe.cli.show import _text
from megatron_dynapipe.core.costs import HEAD, CostTables, Quantity
from megatron_dynapipe.core.errors import ConfigError, InfeasibleError, PlanError
from megatron_dynapipe.core.native import fast_verify
from megatron_dynapipe.core.network import Link, Network
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.scheduling import schedule_batch
from megatron_dynapipe.core.search import notice
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing.pieces import piece_costs
from megatron_dynapipe.costing.shares import latency_ns, share_costs, with_latency
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import decode_plan, encode, encode_entries
from megatron_dynapipe.ways.rules import verify
from megatron_dynapipe.ways.teams import choices_of
from tests.core.planner_cases import batch, cost_model, planner
from tests.core.planner_cases import settings as planner_settings
from tests.core.toy_executor import ToyPipeline
from tests.helpers.examples import examples
from tests.helpers.packed_costs import packed_costs
from tests.helpers.packed_plans import followed, relaid, teamed

GPT = ModelFamily.GPT
replace = msgspec.structs.replace


def made(sizes: tuple[int, ...], *, samples: int = 20, seed: int = 0, layout: str = "mixed") -> IterationPlan:
    """A plan whose replicas are teams of these sizes."""
    plan = planner(GPT, data_parallel=len(sizes)).plan(batch(GPT, samples, seed=seed), 3)
    return teamed(relaid(plan, layout), sizes)


def member(plan: IterationPlan, number: int, **changes: object) -> IterationPlan:
    replicas = list(plan.replicas)
    replicas[number] = replace(replicas[number], **changes)
    return replace(plan, replicas=tuple(replicas))


def test_a_team_counts_its_samples_once() -> None:
    plan = made((2, 1, 1))
    alone = relaid(planner(GPT, data_parallel=3).plan(batch(GPT, 20), 3), "mixed")
    verify(plan, expected_samples=range(100, 120), fast_verify=fast_verify)
    assert plan.teams == (2, 1, 1) and alone.teams == (1, 1, 1)
    assert plan.totals.samples == 20 and plan.totals.real_tokens == alone.totals.real_tokens
    assert plan.totals.padded_positions >= alone.totals.padded_positions - 8
    first, second = (plan.replicas[number].micro_batches[0] for number in (0, 1))
    assert (first.share, second.share) == ((2, 0), (2, 1))
    assert first.begun_ids == first.sample_ids == second.sample_ids and not second.begun_ids
    lengths = [tokens - 1 for tokens in first.input_lengths]
    assert all(own % 2 == 0 and n <= 2 * own < n + 4 for own, n in zip(first.positions(GPT), lengths, strict=True))
    assert decode_plan(encode(plan)) == plan
    assert len(encode_entries(plan)) == 4 * plan.pipeline_stages


def test_members_are_shown_as_one_replica() -> None:
    plan = made((2, 1, 1))
    assert "# iteration 3, replicas 0 to 1, one team: predicted" in _text(plan, 0)
    assert _text(plan, 1).startswith("# iteration 3, replicas 0 to 1, one team")
    assert "# iteration 3, replica 2: predicted" in _text(plan, 2)


def _moved(plan: IterationPlan) -> IterationPlan:
    first, *others = plan.replicas[1].micro_batches
    return member(plan, 1, micro_batches=(replace(first, share=(2, 0)), *others))


def _longer(plan: IterationPlan) -> IterationPlan:
    first, *others = plan.replicas[1].micro_batches
    return member(plan, 1, micro_batches=(*others, first))


def _reordered(plan: IterationPlan) -> IterationPlan:
    its = plan.replicas[1].stages
    return member(plan, 1, stages=(its[0], replace(its[1], instructions=its[1].instructions[::-1])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_moved, "replica 1, place 1 in a team of 2: expected its share in every micro-batch, got another in 0"),
        (_longer, "replica 1, place 1 in a team of 2: expected the first member's micro-batches, got others at 0"),
        (_reordered, "replica 1, place 1 in a team of 2: expected the first member's lists, got others on stages 1"),
        (lambda plan: replace(plan, replicas=plan.replicas[2:] + plan.replicas[:1]), "a multiple of its size, got 2"),
        (lambda plan: replace(plan, replicas=plan.replicas[:1]), "at a multiple of its size, got 2 of 1"),
        (lambda plan: replace(plan, in_step=2), "in step"),
    ],
)
def test_members_that_differ_are_refused(change: Callable[[IterationPlan], IterationPlan], message: str) -> None:
    plan = made((2, 1, 1))
    verify(plan)
    with pytest.raises(PlanError, match=message):
        verify(change(plan))


def _others_first(replica: ReplicaPlan) -> ReplicaPlan:
    size = replica.micro_batches[0].share[0]
    stages = []
    for stage in replica.stages:
        is_later = [replica.micro_batches[its.micro_batch].share[0] < size for its in stage.instructions]
        pairs = sorted(zip(is_later, stage.instructions, strict=True), key=lambda pair: not pair[0])
        stages.append(replace(stage, instructions=tuple(its for _, its in pairs)))
    return replace(replica, stages=tuple(stages))


def test_rows_of_larger_teams_come_first() -> None:
    teams = made((4,))
    own = relaid(planner(GPT, data_parallel=4).plan(later(20, seed=0), 3), "mixed")
    pairs = teamed(relaid(planner(GPT, data_parallel=2).plan(later(20, seed=0), 3), "mixed"), (2, 2))
    for after in (own, pairs):
        plan = followed(teams, after)
        verify(plan, fast_verify=fast_verify)
        assert plan.teams == after.teams
        assert "micro-batch 0: packed shape" in _text(plan, 0) and ", place 3 of 4, recompute" in _text(plan, 3)
        with pytest.raises(
            PlanError, match="replica 0: expected rows of larger teams first, got others on stages 0, 1"
        ):
            verify(replace(plan, replicas=tuple(map(_others_first, plan.replicas))))
    uneven = followed(teams, own)
    with pytest.raises(PlanError, match="replica 1, place 1 in a team of 4: expected the first member's micro-batches"):
        verify(member(uneven, 1, micro_batches=own.replicas[1].micro_batches, stages=own.replicas[1].stages))
    with pytest.raises(PlanError, match="replica 1, place 1 in a team of 4: expected the first member's micro-batches"):
        verify(member(uneven, 0, micro_batches=own.replicas[0].micro_batches, stages=own.replicas[0].stages))


def test_a_micro_batch_of_pieces_has_no_shares() -> None:
    whole = made((1,), layout="packed").replicas[0].micro_batches[0]
    with pytest.raises(PlanError, match="among the ranks that share whole samples, got 2 of 2"):
        replace(whole, share=(2, 2))


def later(samples: int, *, seed: int) -> GlobalBatch:
    """Other samples than a first part's."""
    its: GlobalBatch = batch(GPT, samples, seed=seed)
    return dataclasses.replace(its, sample_ids=its.sample_ids + 1000)


@settings(max_examples=examples(60))
@given(
    st.sampled_from([(2,), (2, 2), (4,), (2, 1, 1), (1, 1, 2), (4, 2, 1, 1), (8,)]),
    st.integers(8, 40),
    st.integers(0, 10**6),
    st.sampled_from(["padded", "packed", "mixed"]),
    st.booleans(),
)
def test_plans_of_teams_pass_both_verifiers_and_run(
    sizes: tuple[int, ...], samples: int, seed: int, layout: str, then: bool
) -> None:
    plan = made(sizes, samples=samples, seed=seed, layout=layout)
    if then:
        own = relaid(planner(GPT, data_parallel=sum(sizes)).plan(later(samples, seed=seed), 3), layout)
        plan = followed(plan, own)
    ids = [*range(100, 100 + samples), *(range(1100, 1100 + samples) if then else ())]
    verify(plan, expected_samples=ids)
    verify(plan, expected_samples=ids, fast_verify=fast_verify)
    for replica in plan.replicas:
        lists = [stage.instructions for stage in replica.stages]
        ToyPipeline(lists, micro_batches=len(replica.micro_batches), seed=seed).run()


def of_lengths(lengths: list[int], *, labels: list[int] | None = None) -> GlobalBatch:
    return GlobalBatch.of_lengths(np.array(lengths) + 1, labels=labels)


def largest_team(plan: IterationPlan) -> int:
    return max(mb.share[0] for replica in plan.replicas for mb in replica.micro_batches)


def planner_with_teams(most: int, **changes: object) -> Planner:
    given = {"data_parallel": 4, "pipeline_parallel": 1, "slices": "auto", "micro_batch_layouts": tuple(BatchLayout)}
    run = planner_settings(GPT, **given | {"memory_limit_bytes": 64 * 10**9, "context_teams": most} | changes)
    return planner_of(run, cost_model(GPT, max_length=16384))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("labels", [False, True])
def test_a_long_sample_goes_to_a_team(stages: int, labels: bool) -> None:
    lengths = [9000, 500, 400, *[100] * 30]
    batch = of_lengths(lengths, labels=[n // 3 for n in lengths] if labels else None)
    alone, shared = (planner_with_teams(most, pipeline_parallel=stages).plan(batch, 0) for most in (1, 4))
    assert largest_team(alone) == 1 and largest_team(shared) > 1
    assert shared.totals.predicted_ns < 0.7 * alone.totals.predicted_ns
    assert shared.totals.samples == len(lengths) and shared.totals.real_tokens == alone.totals.real_tokens
    verify(shared, expected_samples=range(len(lengths)), fast_verify=fast_verify)
    first = [mb for mb in shared.replicas[0].micro_batches if 0 in mb.sample_ids]
    assert [mb.input_lengths[mb.sample_ids.index(0)] for mb in first] == [9001]
    if labels:
        assert [mb.labels[mb.sample_ids.index(0)] for mb in first] == [3000]


def test_whole_samples_are_not_searched_where_teams_surely_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(problem: BatchProblem, *rest: Any, **how: Any) -> Any:
        searched.append(len(problem.inputs) if problem.piece_costs is None else 0)
        return schedule_batch(problem, *rest, **how)

    monkeypatch.setattr("megatron_dynapipe.core.ways.schedule_batch", counted)
    assert largest_team(planner_with_teams(4).plan(of_lengths([9000, *[100] * 30]), 0)) > 1
    assert searched and max(searched) < 31


def test_pieces_of_a_given_size_come_after_a_team() -> None:
    lengths = [9000, *[900] * 12]
    plan = planner_with_teams(4, slices=256).plan(of_lengths(lengths), 0)
    shares = {mb.share[0] for mb in plan.replicas[0].micro_batches}
    assert shares == {4, 1} and plan.totals.cut_samples > 0
    verify(plan, expected_samples=range(len(lengths)), fast_verify=fast_verify)


def test_batches_without_long_samples_are_planned_as_without_teams() -> None:
    batch = of_lengths([100] * 50)
    alone, shared = (planner_with_teams(most).plan(batch, 0) for most in (1, 4))
    assert shared.replicas == alone.replicas


def test_costs_that_know_no_keys_are_named(caplog: pytest.LogCaptureFixture) -> None:
    notice.cache_clear()
    known = planner_with_teams(4)
    tables = [dataclasses.replace(under_mode, key_value_channels=0) for under_mode in known.tables]
    made = planner_over(known.settings, tables, costs_digest="keyless")
    assert made.plan(of_lengths([9000, 100, 100, 100]), 0).teams == (1,) * 4
    assert "no teams of replicas: the cost model does not say how wide keys are" in caplog.text


def test_samples_that_fit_on_no_replica_fit_on_a_team() -> None:
    lengths = [9000, 100, 100, 100, 100, 100]
    given = {"memory_limit_bytes": 8 * 10**9, "slices": "off", "recompute": (Recompute.NONE,)}
    with pytest.raises(InfeasibleError):
        planner_with_teams(1, **given).plan(of_lengths(lengths), 0)
    assert largest_team(planner_with_teams(4, **given).plan(of_lengths(lengths), 0)) == 4


def test_short_samples_share_a_teams_rows() -> None:
    plan = planner_with_teams(2, data_parallel=2).plan(of_lengths([9000, *[300] * 30]), 0)
    assert plan.teams == (2,) and plan.totals.samples == 31
    assert plan.totals.micro_batches[0] < 10


def test_rows_of_shares_cost_what_their_samples_do_in_addition() -> None:
    whole = planner_with_teams(2).problem(planner_with_teams(2).samples(of_lengths([900, 100, 50])))
    extras = np.random.default_rng(0).integers(
        0, 10**6, (len(whole.modes), 3, len(whole.modes[0].kinds), len(Quantity))
    )
    shared = dataclasses.replace(whole, piece_costs=extras)
    rows = [np.array([0, 2]), np.array([1]), np.array([0, 1, 2])]
    packed, mode = [BatchLayout.PACKED] * 3, np.zeros(3, np.int64)
    (before, _), (found, covered) = (problem.costs_of(rows, packed, mode) for problem in (whole, shared))
    layers = sum(kind != HEAD for kind in whole.layout.modules) // 2
    more = [extras[0, row, :, Quantity.FORWARD].sum(axis=0) @ [layers, layers, 1] for row in rows]
    assert covered.all() and ((found.forward_ns - before.forward_ns)[:, 0] == more).all()


@pytest.mark.parametrize(("inter_node_gbps", "most"), [(4800.0, 4), (0.01, 2)])
def test_a_team_spans_nodes_where_that_pays(inter_node_gbps: float, most: int) -> None:
    nodes = Network(devices_per_node=2, inter_node_gbps=inter_node_gbps, inter_node_latency_us=10.0)
    plan = planner_with_teams(4, network=nodes).plan(of_lengths([9000, *[100] * 4]), 0)
    assert largest_team(plan) == most
    verify(plan, expected_samples=range(5), fast_verify=fast_verify)


@settings(max_examples=examples(25))
@given(st.lists(st.integers(1, 300), min_size=1, max_size=25), st.lists(st.integers(2000, 9000), max_size=3))
def test_plans_with_teams_lose_no_sample_and_are_no_slower(short: list[int], long: list[int]) -> None:
    batch = of_lengths([*long, *short])
    alone, shared = (planner_with_teams(most).plan(batch, 0) for most in (1, 4))
    verify(shared, expected_samples=range(len(batch)))
    assert shared.totals.predicted_ns <= 1.001 * alone.totals.predicted_ns
    for replica in shared.replicas:
        lists = [stage.instructions for stage in replica.stages]
        ToyPipeline(lists, micro_batches=len(replica.micro_batches)).run()


def work(*samples: tuple[int, ...]) -> np.ndarray:
    return np.array(samples, np.int64)


def test_teams_are_chosen_by_work() -> None:
    """Of four replicas: alone the sample of 100 takes 100; on a team of two 50, and what is left takes 20."""
    alone = work((100,), (20,), (20,))
    of_two, of_four = alone // 2, alone // 4
    by_work = {1: alone, 2: of_two, 4: of_four}
    assert choices_of(by_work, np.arange(3), 4)[0] == (35.0, (4, 1, 3, 0))
    assert choices_of({1: alone, 2: of_two}, np.arange(3), 4)[0] == (50.0, (2, 1, 1, 2))
    after = {1: work((100,), (20,), (20,), (20,), (20,)), 4: work((25,), (18,), (18,), (18,), (18,))}
    assert choices_of(after, np.arange(5), 4)[0] == (45.0, (4, 1, 1, 4))
    assert choices_of({1: work((20,), (20,)), 2: work((10,), (10,))}, np.arange(2), 2) == []
    with_nowhere_else = {1: work((0,), (20,)), 2: work((50,), (10,))}
    assert choices_of(with_nowhere_else, np.arange(2), 2) == [(60.0, (2, 1, 2, 0)), (70.0, (2, 1, 1, 2))]
    assert choices_of({1: work((0,), (20,)), 2: work((0,), (10,))}, np.arange(2), 2) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_teams": 3}, "in teams of 3: expected 2, 4, 8 … of 4 replicas"),
        ({"context_teams": 8}, "expected 2, 4, 8 … of 4 replicas"),
        (
            {"context_teams": 4, "tensor_parallel": 2, "network": Network(devices_per_node=12)},
            "teams of 4 × 2 devices do not fill nodes of 12",
        ),
        ({"micro_batch_layouts": (BatchLayout.PADDED,)}, "shares run in packed rows"),
        ({"replicas_in_step": 2}, "experts count the tokens of whole samples"),
        ({"schedule": ScheduleSettings(method="1f1b")}, "the adaptive schedule alone"),
    ],
)
def test_runs_that_can_have_no_teams_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"data_parallel": 4, "context_teams": 2, "micro_batch_layouts": tuple(BatchLayout)}
    with pytest.raises(ConfigError, match=message):
        planner_settings(GPT, **given | changes)


def test_a_t5_has_no_teams() -> None:
    with pytest.raises(ConfigError, match="every position of a T5's encoder attends to all of them"):
        planner_settings(ModelFamily.T5, data_parallel=2, context_teams=2, micro_batch_layouts=tuple(BatchLayout))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_share_costs_what_two_pieces_of_its_chunks_do(ranks: int) -> None:
    """Of attention's pairs; beside them gathers, which the link's rate alone decides."""
    tables = cost_model(GPT, max_length=16384).tables(tensor_parallel=1, recompute=Recompute.NONE)
    chunk, none = np.array([500]), np.zeros(1, np.int64)
    fast, slow = (Network(intra_node_gbps=rate) for rate in (1e12, 8.0))
    price = partial(share_costs, tables, chunk=chunk, ranks=ranks, element_bytes=2, tensor_parallel=1)
    share = price(Recompute.NONE, network=fast)[0, 0]
    tiled = np.zeros(len(Quantity))
    for place in range(ranks):
        for before in (place, 2 * ranks - 1 - place):
            tiled += piece_costs(
                tables, Recompute.NONE, positions=chunk, before=before * chunk, later=none, element_bytes=2
            )[0, 0]
    # A row of two chunks counts as one sample already: the second chunk's pairs with the first are not of the prefix.
    own = piece_costs(tables, Recompute.NONE, positions=chunk, before=chunk, later=none, element_bytes=2)[0, 0]
    for quantity in (Quantity.FORWARD, Quantity.BACKWARD):
        assert share[quantity] * ranks == pytest.approx(tiled[quantity] - ranks * own[quantity], rel=1e-3)
    gathered = price(Recompute.NONE, network=slow)[0, 0] - share
    of_member = 2 * tables.key_value_channels * 1000 * 2
    assert gathered[Quantity.FORWARD] == pytest.approx((ranks - 1) * of_member, rel=1e-6)  # a byte takes a nanosecond
    assert gathered[Quantity.BACKWARD] == pytest.approx(2 * (ranks - 1) * of_member, rel=1e-6)
    again = price(Recompute.FULL, network=slow)[0, 0] - price(Recompute.FULL, network=fast)[0, 0]
    assert again[Quantity.BACKWARD] == pytest.approx(3 * (ranks - 1) * of_member, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "gbps", "latency"),
    [(2, 1, 800, 20_000), (4, 1, 200, 60_000), (2, 2, 100, 60_000), (2, 4, 100, 60_000)],
)
def test_teams_gather_over_the_links_that_they_span(ranks: int, tensor_parallel: int, gbps: int, latency: int) -> None:
    """Between nodes of two devices, over as many links as a node has members."""
    network = Network(
        devices_per_node=2,
        intra_node_gbps=800,
        inter_node_gbps=100,
        intra_node_latency_us=10,
        inter_node_latency_us=30,
    )
    tables = cost_model(GPT, max_length=16384).tables(tensor_parallel=1, recompute=Recompute.NONE)
    price = partial(share_costs, tables, Recompute.NONE, chunk=np.array([500]), ranks=ranks, element_bytes=2)
    free = price(network=Network(intra_node_gbps=1e12), tensor_parallel=1)[0, 0, Quantity.FORWARD]
    found = price(network=network, tensor_parallel=tensor_parallel)[0, 0, Quantity.FORWARD] - free
    assert found == pytest.approx((ranks - 1) * 2 * tables.key_value_channels * 1000 * 2 * 8 / gbps, rel=1e-4)
    assert latency_ns(ranks, network, tensor_parallel=tensor_parallel) == latency
    rows_before, rows = (packed_costs(its, *lengths_of(500, 80, 8)) for its in (tables, waiting(tables, latency)))
    assert rows is not None and rows_before is not None
    more = (rows - rows_before)[0]
    assert abs(more[Quantity.FORWARD] - latency) <= 1 and abs(more[Quantity.BACKWARD] - 2 * latency) <= 1
    assert not (rows - rows_before)[1:].any(), "attention alone gathers"
    measured = dataclasses.replace(network, gathers=Link(latency_us=1.5, gbps=50.0))
    its = price(network=measured, tensor_parallel=tensor_parallel)[0, 0, Quantity.FORWARD] - free
    assert its == pytest.approx(found * gbps / min(gbps, 50.0), rel=1e-4)
    is_inside = ranks * tensor_parallel <= 2
    assert latency_ns(ranks, measured, tensor_parallel=tensor_parallel) == (3_000 if is_inside else latency)


def lengths_of(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array(lengths), np.zeros(len(lengths), np.int64)


def waiting(tables: CostTables, once_ns: int) -> CostTables:
    return with_latency(tables, Recompute.NONE, once_ns)
