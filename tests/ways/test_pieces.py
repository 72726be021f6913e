"""Planning with long samples cut into pieces."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.choosing.least_work import LeastWork
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli.plan import _replicas
from megatron_dynapipe.cli.show import _text
from megatron_dynapipe.core.costs import (
    ATTENTION,
    EXPERT_MLP,
    HEAD,
    MLP,
    PEAK_UNIT,
    PREFIX_UNIT,
    CostTables,
    Division,
    IntArray,
    Peak,
    Quantity,
    Rates,
)
from megatron_dynapipe.core.errors import ConfigError, InfeasibleError, PlanningError
from megatron_dynapipe.core.network import CUDA_RULES
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.search import notice
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import (
    A100_RATES,
    AnalyticCostModel,
    CostModel,
    ModelShape,
    TableCostModel,
    even_layer_split,
)
from megatron_dynapipe.costing.pieces import piece_costs, prefix_curvatures
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import decode_plan, encode
from megatron_dynapipe.ways.chains import chains
from megatron_dynapipe.ways.pieces import MOST_PIECES, cut, cut_batch, within_bound
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import cost_model, of_lengths
from tests.helpers import benchmark_data
from tests.helpers.benchmark_data import A100_COSTS
from tests.helpers.packed_costs import packed_costs
from tests.helpers.settings import settings_in_layers

GPT = ModelFamily.GPT
COSTS = TableCostModel.load(A100_COSTS["gpt"])
LENGTHS = [100, 6553, 40, 300, 220, 3000, 90, 64, 700, 512, 1200, 33, 80, 410, 77, 150] * 2
USUAL = {
    "family": GPT,
    "encoder_layers": 32,
    "hidden_size": 4096,
    "pipeline_parallel": 4,
    "tensor_parallel": 2,
    "memory_limit_bytes": 36_000_000_000,
    "micro_batch_layouts": tuple(BatchLayout),
    "slices": "auto",
}


def settings(**changes: object) -> PlannerSettings:
    return settings_in_layers(**(USUAL | changes))


def batch(lengths: list[int]) -> GlobalBatch:
    return of_lengths(lengths, first=100)


def plan(lengths: list[int] = LENGTHS, *, forward_only: bool = False, **changes: object) -> IterationPlan:
    return planner_of(settings(**changes), COSTS).plan(batch(lengths), 0, forward_only=forward_only)


def cut_samples(planned: IterationPlan) -> int:
    return sum(len(chains(replica.micro_batches)) for replica in planned.replicas)


def test_pieces_of_several_chunks_start_their_transfers_earlier_where_they_would_stall() -> None:
    """Turned chains of several chunks wait for one another where transfers start in order, on three stages or more."""
    layout = {"pipeline_parallel": 3, "chunks": 2, "layers_per_stage": even_layer_split(32, 6)}
    limits = {"transfers": CUDA_RULES, "memory_limit_bytes": 80 * 10**9}
    whole, planned = (plan(slices=slices, **limits, **layout) for slices in ("off", "auto"))
    assert cut_samples(planned) and planned.totals.predicted_ns < whole.totals.predicted_ns
    verify(planned, ordered_starts=True)


def test_where_pieces_have_no_order_a_notice_says_that_samples_stay_whole(caplog) -> None:
    notice.cache_clear()
    with pytest.raises(InfeasibleError):
        plan(slices=1024, memory_limit_bytes=16 * 10**9)
    assert "no order of pieces of at most 1024 positions was found: samples stay whole" in caplog.text


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(64, 4000), st.sampled_from([8, 16, 64]))
def test_pieces_tile_in_equal_time(lengths: list[int], most: int, multiple: int) -> None:
    tables = COSTS.tables(tensor_parallel=1, recompute=Recompute.NONE)
    strict = cut(np.array(lengths), most, multiple, tables, strict=True)
    assert (strict.end - strict.start).max() <= max(most, multiple)
    pieces = cut(np.array(lengths), most, multiple, tables)
    for sample, length in enumerate(lengths):
        its = pieces.sample == sample
        starts, ends = pieces.start[its].tolist(), pieces.end[its].tolist()
        assert [*starts, length] == [0, *ends]
        assert all(end % multiple == 0 for end in ends[:-1])
        own = np.diff([0, *ends])
        assert (np.diff(own) < 2 * multiple).all(), "later pieces attend to more, so they are no longer but by rounding"
        if length <= most:
            assert len(own) == 1
    assert (np.unique(pieces.chains[pieces.is_piece == 1]) == np.arange(pieces.chains.max() + 1)).all()


def test_the_core_charges_pieces_by_the_rules_of_cost_pieces() -> None:
    of_halves = Rates(3, 0, 1), Rates(1, 1, 400)
    division = Division(
        forward=Rates(2, 0, 1),
        backward=Rates(2, 0, 1),
        stored=of_halves,
        peak=(Peak(5000, PEAK_UNIT * 60_000, PEAK_UNIT), Peak(7000, PEAK_UNIT * 90_000, 0)),
        parameters=(1, 1),
    )
    keys = {name: msgspec.structs.replace(key, division={"encoder": division}) for name, key in COSTS.file.keys.items()}
    measured = TableCostModel(msgspec.structs.replace(COSTS.file, keys=keys), digest="")
    planner = planner_of(settings(pipeline_parallel=2, layers_per_stage=(15.5, 16.5)), measured)
    samples = planner.samples(batch(LENGTHS))
    found = cut_batch(samples, planner.problem(samples), 1000, 16, recompute=tuple(Recompute), element_bytes=2)
    assert found is not None
    rows, problem = [np.array([0, 1]), np.array([2, 9]), np.array([7])], found.problem
    before = np.zeros_like(problem.input_positions)
    for at in range(1, len(before)):
        if problem.chains[at] >= 0 and problem.chains[at] == problem.chains[at - 1]:
            before[at] = before[at - 1] + problem.input_positions[at - 1]
    for number, mode in enumerate(Recompute):
        tables = COSTS.tables(tensor_parallel=2, recompute=mode)
        costs, covered = found.problem.costs_of(rows, [BatchLayout.PACKED] * 3, np.full(3, number))
        assert covered.all()
        for at, row in enumerate(rows):
            own = found.problem.input_positions[row]
            layer = packed_costs(tables, own, np.zeros_like(own))
            assert layer is not None and found.problem.piece_costs is not None
            layer += found.problem.piece_costs[number, row].sum(axis=0)
            forward, _, stored, *_ = layer[:2].sum(axis=0)
            peak = layer[0, Quantity.PEAK]
            assert costs.forward_ns[at, 0] == pytest.approx(15 * forward + forward * 2 / 3, abs=32)
            assert costs.stored_bytes[at, 0] == pytest.approx(15 * stored + stored * 3 / 4, abs=32)
            kept = costs.stored_bytes[at, 0]
            assert costs.peak_bytes[at, 0] >= max(kept, 15 * stored + peak - stored / 4) - 32  # less what the MLP keeps
            assert costs.peak_bytes[at, 0] <= max(kept, 15 * stored + peak) + 32
            pairs = int((own * own).sum())  # what a prefix adds to what is stored is divided as the rest is
            mlp = max(400 * own.sum() / (401 * own.sum() + pairs), 1 / 4)
            assert costs.stored_bytes[at, 1] == pytest.approx(16 * stored + stored * mlp, rel=0.005)
            assert costs.peak_bytes[at, 1] - costs.stored_bytes[at, 1] == pytest.approx(max(peak - stored, 0), abs=32)


def test_a_piece_pays_for_its_prefix_and_keeps_keys_and_values() -> None:
    own, before, later = np.array([512, 512, 256]), np.array([0, 512, 1024]), np.array([2, 1, 0])
    made = cost_model(GPT, hidden=64, vocabulary=512, rates=A100_RATES, max_size=2, max_length=64)
    packed = made.tables(tensor_parallel=1, recompute=Recompute.NONE)
    assert packed.packed is not None
    measured = replace(packed, packed=replace(packed.packed, prefix=np.array([[2 * PREFIX_UNIT, PREFIX_UNIT, 1]] * 4)))
    costs = piece_costs(measured, Recompute.NONE, positions=own, before=before, later=0 * own, element_bytes=2)
    assert costs[:, 0, Quantity.FORWARD].tolist() == [
        0,
        2 + 512 + round(512**2 / PREFIX_UNIT),
        2 + 1024 + round(1024 * 256 / PREFIX_UNIT),
    ]
    kept = {Recompute.NONE: [1, 1, 0], Recompute.SELECTIVE: [1, 1, 0], Recompute.FULL: [2, 2, 1]}
    for mode, times in kept.items():
        tables = COSTS.tables(tensor_parallel=1, recompute=mode)
        costs = piece_costs(tables, mode, positions=own, before=before, later=later, element_bytes=2)
        (up, down), *_ = prefix_curvatures(tables)
        layer = costs.sum(axis=1)
        assert layer[:, Quantity.FORWARD] == pytest.approx(
            [0, 2 * 512 * 512 * up / down, 2 * 1024 * 256 * up / down], abs=1
        )
        stored = layer[:, Quantity.STORED] - [
            (2 * a * n * prefix_curvatures(tables)[2][0]) // down for a, n in zip(before, own, strict=True)
        ]
        assert np.abs(stored - np.array(times) * own * 4 * 4096).max() <= 1
    tables = COSTS.tables(tensor_parallel=1, recompute=Recompute.NONE)
    few, many = (
        piece_costs(tables, Recompute.NONE, positions=own, before=0 * own, later=np.array(later), element_bytes=2).sum(
            axis=1
        )[:, Quantity.STORED]
        for later in ([3, 1, 0], [4, 1, 0])
    )
    assert (many - few).tolist() == [512 * 4 * 4096, 0, 0], "sums of many gradients are in fp32"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline_parallel": 8, "tensor_parallel": 1},
        {"data_parallel": 2, "pipeline_parallel": 2},
        {"chunks": 2},
        {"recompute": (Recompute.FULL,)},
        {"transfers": CUDA_RULES},
        {"micro_batch_layouts": (BatchLayout.PACKED,)},
        {"sequence_parallel": True, "slices": 500},
        {"slices": 300},
    ],
    ids=str,
)
def test_plans_with_pieces_are_verified_whole(changes: dict[str, object]) -> None:
    planned = plan(**({"slices": 900} | changes))
    verify(planned, expected_samples=range(100, 100 + len(LENGTHS)))  # tiles, order of chains, memory; no fast core
    assert cut_samples(planned) >= 2
    assert planned.totals.samples == len(LENGTHS)
    assert planned.totals.real_tokens == sum(LENGTHS)
    assert decode_plan(encode(planned)) == planned
    assert plan(**({"slices": 900} | changes)) == planned, "planning is a pure function"


def test_show_says_where_pieces_run() -> None:
    planned = plan()
    for replica in range(len(planned.replicas)):
        for sample, chain in chains(planned.replicas[replica].micro_batches).items():
            first, *_ = chain
            assert f"# sample {sample} in {len(chain)} pieces: forward F{first} → F" in _text(planned, replica)


def test_auto_cuts_where_that_is_faster() -> None:
    whole, cut_plan = plan(slices="off"), plan()
    assert cut_samples(cut_plan) > 0
    assert cut_plan.totals.predicted_ns < 0.9 * whole.totals.predicted_ns
    short = [length for length in LENGTHS if length < 1000] * 4
    planned = plan(short)
    assert cut_samples(planned) == 0
    assert planned.replicas == plan(short, slices="off").replicas


def test_a_sample_that_does_not_fit_whole_is_planned_in_pieces() -> None:
    lengths = [6553, *[200] * 12]
    tight: dict[str, object] = {"memory_limit_bytes": 17_500_000_000, "recompute": (Recompute.FULL,)}
    with pytest.raises(InfeasibleError):
        plan(lengths, slices="off", **tight)
    assert cut_samples(plan(lengths, **tight)) == 1


def test_evaluations_and_samples_that_come_twice_stay_whole() -> None:
    assert cut_samples(plan(slices=500, forward_only=True)) == 0
    twice = batch([6553, 6553, 100, 100])
    twice = GlobalBatch(
        iteration=0,
        sample_ids=np.array([1, 1, 2, 3]),
        input_lengths=twice.input_lengths,
        target_lengths=twice.target_lengths,
    )
    assert cut_samples(planner_of(settings(slices=1000), COSTS).plan(twice, 0)) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": ModelFamily.T5, "decoder_layers": 32}, "every position of a T5's encoder attends to all of them"),
        ({"micro_batch_layouts": (BatchLayout.PADDED,)}, "pieces and shares run in packed rows"),
    ],
)
def test_pieces_where_there_can_be_none_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(slices=512, **changes)
    assert not settings(slices="auto", **changes).may_cut


def twice(values: IntArray) -> IntArray:
    """Costs by kind, those of MLPs again as of experts."""
    return np.concatenate([values[:2], values[1:]])


class TwoKinds:
    """The costs of a model with MLPs of two kinds, which cost the same."""

    family, hidden_size, links, name, digest = GPT, 4096, {}, "two kinds", ""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        """All costs of MLPs twice."""
        of = self._costs.tables(tensor_parallel=tensor_parallel, recompute=recompute)
        rows = None
        if of.packed is not None:
            rows = replace(of.packed, linear=twice(of.packed.linear), attention=twice(of.packed.attention))
        return replace(
            of,
            kinds=(ATTENTION, MLP, EXPERT_MLP, HEAD),
            values=twice(of.values),
            separate=None if of.separate is None else twice(of.separate),
            packed=rows,
            state=replace(of.state, modules={**of.state.modules, EXPERT_MLP: of.state.modules[MLP]}),
        )


@pytest.mark.parametrize("labels", [False, True], ids=["all positions", "labels"])
@pytest.mark.parametrize("counted", [False, True], ids=["derived rows", "counted rows"])
def test_pieces_cost_layers_with_experts_what_they_cost_others(counted: bool, labels: bool) -> None:
    shape = ModelShape(family=GPT, hidden=4096, heads=32, kv_channels=128, ffn=16384, vocabulary=50000)
    costs = AnalyticCostModel(shape, A100_RATES) if counted else COSTS

    def of_rows(costs: CostModel, **changes: Any) -> list[Any]:
        made = planner_of(settings(slices=1000, recompute=(Recompute.NONE,), **changes), costs)
        samples = made.samples(batch(LENGTHS))
        found = cut_batch(samples, made.problem(samples), 1000, 16, recompute=(Recompute.NONE,), element_bytes=2)
        assert found is not None
        problem = found.problem
        if labels:
            problem = replace(problem, labels=problem.input_positions // 2, label_experts=True)
        members = list(np.arange(len(found.samples.ids)).reshape(-1, 1))
        rows, covered = problem.costs_of(members, [BatchLayout.PACKED] * len(members), np.zeros(len(members), np.int64))
        assert covered.all()
        return [getattr(rows, name).tolist() for name in ("forward_ns", "backward_ns", "stored_bytes", "peak_bytes")]

    assert of_rows(costs) == of_rows(TwoKinds(costs), expert_layers=range(1, 32))


def test_a_batch_with_fewer_chains_than_replicas_is_planned_whole() -> None:
    lengths = [900, 800, 16, 16]
    planned = plan(lengths, data_parallel=4, pipeline_parallel=2, slices=100)
    verify(planned, expected_samples=range(100, 104))
    assert all(replica.micro_batches for replica in planned.replicas)


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, 1e-4),
        # Rows of whole samples are divided sample by sample, those with pieces as a whole.
        ({"layers_per_stage": (7.5, 8.5, 8.5, 7.5), "split_backward": "auto"}, 2e-3),
        ({"layers_per_stage": (7.5, 8.5, 8.5, 7.5), "split_backward": "on"}, 2e-3),
        ({"layers_per_stage": (4, 4.5, 4, 4, 4, 3.5, 4, 4), "chunks": 2, "split_backward": "auto"}, 2e-3),
    ],
    ids=["whole", "halves", "halves, all divided", "virtual stages"],
)
def test_the_independent_scorer_finds_the_same_time_and_memory(changes: dict[str, Any], within: float) -> None:
    planned = plan(LENGTHS, **({"slices": 900} | changes))
    report = {
        "predicted_ms": planned.totals.predicted_ns / 1e6,
        "replicas": _replicas(planned, changes.get("layers_per_stage", (8, 8, 8, 8))),
    }
    asked = {"model": "gpt", "layers": 32, "encoder_layers": None, "decoder_layers": None, "hidden": 4096}
    run = SimpleNamespace(**asked, dp=1, tp=2, pp=4, memory_mb=36_000, split="auto")
    scorer = benchmark_data.scorer()
    found = scorer.check_and_score(run, scorer.Cost(A100_COSTS["gpt"]), {"input": LENGTHS}, _from_0(report))
    assert found["said"] == pytest.approx(1.0, rel=within)
    assert found["n"] == len(planned.replicas[0].micro_batches)


def _from_0(report: dict[str, Any]) -> dict[str, Any]:
    """Samples by their places in the batch, as `plan --json` names them."""
    for replica in report["replicas"]:
        for micro_batch in replica["micro_batches"]:
            rows = [row if isinstance(row, list) else [row] for row in micro_batch["samples"]]
            micro_batch["samples"] = [
                [[x[0] - 100, *x[1:]] if isinstance(x, list) else x - 100 for x in row] for row in rows
            ]
    return report


def test_a_batch_has_a_bounded_number_of_pieces(caplog) -> None:
    """Pieces of 16 positions would be 3,000: they have 32."""
    notice.cache_clear()
    samples = planner_of(settings(slices=16), COSTS).samples(batch([6000] * 8))
    assert within_bound(samples, 16) == 32 and within_bound(samples, 24) == 24
    made = plan([6000] * 8, slices=16, memory_limit_bytes=80_000_000_000)
    pieces = [sample for replica in made.replicas for mb in replica.micro_batches for sample in mb.sample_ids]
    assert MOST_PIECES / 2 < len(pieces) <= MOST_PIECES
    assert f"pieces of at most 16 positions would be more than {MOST_PIECES} of a batch" in caplog.text


@pytest.mark.parametrize("positions", [65_544, 131_072, 2**20])
def test_samples_may_be_as_long_as_a_grid(positions) -> None:
    """Costs of rows were asked for up to 16 times as long; pieces of a million cost more than the core takes."""
    costs = cost_model(GPT, hidden=64, heads=1, max_length=positions, max_size=2, rates=A100_RATES)
    layout = {"encoder_layers": 4, "hidden_size": 64, "tensor_parallel": 1, "pipeline_parallel": 2}
    planner = planner_of(settings(memory_limit_bytes=80 * 10**9, **layout), costs)
    made = planner.plan(batch([positions + 1, 300]), 0)
    assert sorted({n for mb in made.replicas[0].micro_batches for n in mb.sample_ids}) == [100, 101]
    work = LeastWork(planner, planner.samples(batch([positions + 1, 300])))
    assert 0 < work.everywhere(work.times()) <= made.totals.predicted_ns


def test_a_longer_sample_is_refused_by_its_length() -> None:
    costs = cost_model(GPT, max_length=2**20)
    with pytest.raises(PlanningError, match=r"at most 1048576 positions \(2\^20\), got 1048584") as caught:
        planner_of(settings(encoder_layers=4, hidden_size=128), costs).plan(batch([2**20 + 2]), 0)
    assert "--seq-length" in str(caught.value.hint)
