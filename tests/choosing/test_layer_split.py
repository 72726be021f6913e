"""The choice of layers per stage: even work, what memory allows, the same every time."""

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing import layer_split
from megatron_dynapipe.choosing.evenest import tilted
from megatron_dynapipe.choosing.layer_split import choose_layer_split
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.choosing.rescheduling import Rescheduler
from megatron_dynapipe.core.batch import GlobalBatch, Samples, fits_alone
from megatron_dynapipe.core.costs import ATTENTION, DECODER_ATTENTION, DECODER_MLP, HEAD, MLP
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.orders import Rule, list_schedule, policies
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, CostTables, ModelState, Network, Quantity
from tests.core.planner_cases import batch, batch_of, cost_model, planner
from tests.helpers.examples import examples
from tests.helpers.settings import settings_in_layers
from tests.helpers.stage_costs import GPT_KINDS, grid_values

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
SIZES = np.array([1, 2, 4, 8, 16], np.int64)
LENGTHS = np.array([8, 64, 512], np.int64)
BYTES = 1000  # of a layer's activations a position
MESSAGE = 16  # bytes of a hidden state
STATE = 100_000  # bytes of a layer's parameters


class Costs:
    """Costs in proportion to positions: nanoseconds a position for each kind of layer, the same back, and bytes.

    Encoder layers and a decoder-only model's head count input positions, decoder layers and a T5's head target ones.
    """

    name, digest, hidden_size = "made up", "0", None

    def __init__(self, family: ModelFamily, *, encoder: int = 100, decoder: int = 0, head: int = 0) -> None:
        self.family = family
        self._times = {"ENCODER": encoder, "DECODER": decoder, "HEAD": head}

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        targets = LENGTHS if self.family is T5 else np.zeros(1, np.int64)
        size, inputs, target = np.meshgrid(SIZES, LENGTHS, targets, indexing="ij")
        values = {}
        for kind, layer in {ATTENTION: "ENCODER", DECODER_ATTENTION: "DECODER", HEAD: "HEAD"}.items():
            if self.family is GPT and kind == DECODER_ATTENTION:
                continue
            positions = size * (inputs if self.family is GPT or kind == ATTENTION else target)
            memory = 0 if kind == HEAD else BYTES
            values |= {(kind, what): positions * self._times[layer] for what in (Quantity.FORWARD, Quantity.BACKWARD)}
            values |= {(kind, what): positions * memory for what in (Quantity.STORED, Quantity.PEAK)}
        kinds = GPT_KINDS if self.family is GPT else (ATTENTION, MLP, DECODER_ATTENTION, DECODER_MLP, HEAD)
        return CostTables(
            kinds=kinds,
            sizes=SIZES,
            inputs=LENGTHS,
            targets=targets,
            values=grid_values(kinds, values, *size.shape),
            state=ModelState(embedding_bytes=0, modules={ATTENTION: STATE, DECODER_ATTENTION: STATE}),
        )


def chosen(
    costs: Costs,
    split: tuple[int, ...],
    *lengths: tuple[int, int],
    encoder_layers: int | None = None,
    to_fit: tuple[tuple[int, int], ...] = (),
    **changes: Any,
) -> tuple[int, ...]:
    """The choice that begins with a split, for one batch of the given lengths."""
    settings = run_settings(costs, split, encoder_layers=encoder_layers, **changes)
    return choose_layer_split(settings, costs, [batch_of(*lengths)], to_fit=[batch_of(*to_fit)] if to_fit else [])


def run_settings(
    costs: Costs, split: tuple[int, ...], *, encoder_layers: int | None = None, **changes: Any
) -> PlannerSettings:
    encoder = sum(split) if encoder_layers is None else encoder_layers
    given = {
        "encoder_layers": encoder,
        "decoder_layers": sum(split) - encoder,
        "hidden_size": 8,
        "pipeline_parallel": len(split),
        "layers_per_stage": split,
        "memory_limit_bytes": 10**9,
        "recompute": (Recompute.NONE,),
        "network": Network(inter_node_latency_us=0.0),
    }
    return settings_in_layers(costs.family, **given | changes)


ALIKE = [(65, 0)] * 16
PAIRS = [(64, 62)] * 16


@pytest.mark.parametrize(
    ("costs", "split", "encoder_layers", "lengths", "expected"),
    [
        pytest.param(Costs(GPT), (4, 4), None, ALIKE, (4, 4), id="already even"),
        pytest.param(Costs(GPT), (6, 1, 1), None, ALIKE, (3, 3, 2), id="evens out an uneven start"),
        pytest.param(Costs(GPT, head=200), (4, 4), None, ALIKE, (5, 3), id="a head on the last stage is two layers"),
        pytest.param(Costs(GPT, head=900), (2, 2), None, ALIKE, (3, 1), id="a stage keeps one layer"),
        pytest.param(Costs(T5, decoder=300), (4, 4), 4, PAIRS, (5, 3), id="T5's boundary falls inside a stage"),
        pytest.param(Costs(T5, encoder=300, decoder=100), (4, 4), 4, PAIRS, (3, 5), id="and in the other one"),
        pytest.param(Costs(T5, decoder=100), (2, 6), 4, PAIRS, (4, 4), id="T5's layers cost the same"),
        pytest.param(Costs(GPT), (4,), None, ALIKE, (4,), id="one stage"),
    ],
)
def test_choice(caplog, costs, split, encoder_layers, lengths, expected) -> None:
    assert chosen(costs, split, *lengths, encoder_layers=encoder_layers) == expected
    assert not caplog.records, "nothing is said where all samples fit"


def test_splits_whose_model_state_is_too_much_are_none() -> None:
    """Six layers' state exceeds the memory, four layers' does not; or that of four does, too."""
    assert chosen(Costs(GPT), (6, 2), *ALIKE, memory_limit_bytes=5 * STATE * 8) == (4, 4)
    with pytest.raises(PlanningError, match=r"none of 1 batches can be planned with layers per stage of \(4, 4\) or"):
        chosen(Costs(GPT), (4, 4), *ALIKE, memory_limit_bytes=2 * STATE * 8)


def test_the_same_every_time() -> None:
    random = np.random.default_rng(0)
    lengths = [(int(n), int(m)) for n, m in random.integers(1, 500, (40, 2))]
    costs = Costs(T5, decoder=170, head=90)
    found = {chosen(costs, (4, 4, 4), *lengths, encoder_layers=6) for _ in range(2)}
    assert len(found) == 1


@pytest.mark.parametrize(
    "impossible",
    [
        pytest.param((2000, 0), id="longer than the cost model's grid"),
        pytest.param((500, 0), id="more than the memory"),
    ],
)
def test_samples_that_fit_nowhere_are_left_out(impossible: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    costs, limit = Costs(GPT, head=200), {"memory_limit_bytes": 5 * STATE * 8 + 5 * 200 * BYTES}
    with caplog.at_level(logging.WARNING):
        found = chosen(costs, (4, 4), *ALIKE, impossible, **limit)
    assert found == chosen(costs, (4, 4), *ALIKE, **limit) == (5, 3)
    assert "1 of 17 samples are left out of the choice of a layer split" in caplog.text


@pytest.mark.parametrize(("samples", "expected"), [(16, 3), (40, 2), (80, 1)])
def test_of_large_batches_fewer_are_planned(samples: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, planned, plan = Costs(GPT), list[int](), layer_split._plan
    monkeypatch.setattr(layer_split, "SAMPLES", 80)
    monkeypatch.setattr(
        layer_split, "_plan", lambda planner, batch: (planned.append(id(batch)), plan(planner, batch))[1]
    )
    choose_layer_split(run_settings(costs, (6, 1, 1)), costs, [batch_of(*[(65, 0)] * samples) for _ in range(5)])
    assert len([times for times in Counter(planned).values() if times > 1]) == expected


def test_what_fitted_goes_on_fitting() -> None:
    """With five layers on a stage the long sample does not fit, so the head's stage keeps its four."""
    costs, limit = Costs(GPT, head=200), {"memory_limit_bytes": 4 * STATE * 8 + 4 * 512 * (BYTES + MESSAGE)}
    long = (513, 0)
    assert chosen(costs, (4, 4), *ALIKE, **limit) == (5, 3)
    assert chosen(costs, (4, 4), *ALIKE, long, **limit) == (4, 4)
    assert chosen(costs, (4, 4), *ALIKE, to_fit=(long,), **limit) == (4, 4)


@settings(max_examples=examples(25))
@given(st.lists(st.integers(9, 600), min_size=4, max_size=12), st.integers(0, 500), st.integers(200, 600))
def test_no_sample_that_fitted_is_lost(lengths: list[int], head: int, room: int) -> None:
    costs, limit = Costs(GPT, head=head), {"memory_limit_bytes": 5 * STATE * 8 + 4 * room * BYTES}
    samples = [(n, 0) for n in lengths]
    try:
        found = chosen(costs, (4, 4, 4), *samples, **limit)
    except PlanningError:
        found = (4, 4, 4)
    of_batch = Samples.of(batch_of(*samples), GPT)
    before, after = (
        fits_alone(planner_of(run_settings(costs, split, **limit), costs).problem(of_batch))
        for split in ((4, 4, 4), found)
    )
    assert (after | ~before).all()


def test_a_layer_is_divided_where_that_evens_stages() -> None:
    """Three layers on two stages; attention is about a third of each."""
    rates = msgspec.structs.replace(A100_RATES, layer_overhead_us=0.0)
    costs = cost_model(GPT, hidden=512, heads=8, vocabulary=512, rates=rates, max_size=16, max_length=512)
    options = run_settings(Costs(GPT), (2, 1), hidden_size=512, memory_limit_bytes=10**10)
    assert choose_layer_split(options, costs, [batch_of(*[(400, 0)] * 16)]) == (1.5, 1.5)
    assert choose_layer_split(options, costs, [batch_of(*[(400, 0)] * 16)], halves=False) == (2, 1)
    tight = run_settings(Costs(GPT), (1, 1), hidden_size=512, memory_limit_bytes=105 * 10**6)
    found = choose_layer_split(tight, costs, [batch_of((500, 0), *[(400, 0)] * 8)], chunks=(2,))
    assert found == (1, 1), "an MLP apart keeps its input, too, for which a sample of 500 leaves no room"


def test_halves_begin_with_the_best_of_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few splits are tried, so that halves are never behind whole layers."""
    monkeypatch.setattr(layer_split, "TRIALS", 2)
    costs = cost_model(T5, hidden=512, heads=8, vocabulary=32_000, max_size=16, max_length=512)
    room = {"hidden_size": 512, "memory_limit_bytes": 3 * 10**9}
    options = run_settings(Costs(T5), (4,) * 4, encoder_layers=8, **room)
    batch, times = batch_of(*[(n, n // 4) for n in range(40, 290, 9)]), []
    for halves in (False, True):
        split = choose_layer_split(options, costs, [batch], halves=halves)
        planner = planner_of(options.with_layers_per_stage(split), costs)
        times.append(planner.plan(batch, 0).totals.predicted_ns)
    assert times[1] < times[0]


@pytest.mark.parametrize(("family", "split"), [(GPT, (2.5, 1.5)), (GPT, (1, 1.5, 1, 0.5)), (T5, (4.5, 3.5))])
@pytest.mark.parametrize("layouts", [(BatchLayout.PADDED,), (BatchLayout.PACKED,)])
def test_known_micro_batches_cost_what_they_do_in_a_plan(family, split, layouts) -> None:
    """And scheduling them again takes about as long, longer where memory lacks."""
    changes = {"layers_per_stage": split, "chunks": len(split) // 2, "micro_batch_layouts": layouts}
    made, lengths = planner(family, **changes), batch(family, 24)
    (replica,) = made.plan(lengths, 0).replicas
    rows = [np.array(micro_batch.sample_ids) - 100 for micro_batch in replica.micro_batches]
    modes = np.array([[made.settings.recompute.index(mode) for mode in mb.recompute] for mb in replica.micro_batches])
    expected, _ = made.problem(made.samples(lengths)).costs_of(rows, [layouts[0]] * len(rows), modes)
    rescheduler = Rescheduler(made.settings, made.tables, 1.0)
    (known,) = rescheduler.module_costs(made.plan(lengths, 0), made)
    takes = rescheduler.makespan_ns(known, made.layout.modules_per_stage)
    tried = [policy for policy in policies(expected) if policy.rule is not Rule.STRICT]
    runs = [simulate(expected, order).makespan_ns for policy in tried if (order := list_schedule(expected, policy))]
    passes = 2 * len(rows) * len(split)
    assert takes == pytest.approx(min(runs), abs=passes * len(made.layout.modules)), "by the core's own costs"
    assert replica.predicted_ns * 0.98 <= takes <= replica.predicted_ns * 1.2
    short = Rescheduler(msgspec.structs.replace(made.settings, memory_limit_bytes=3 * 10**7), made.tables, 1.0)
    assert short.makespan_ns(known, made.layout.modules_per_stage) > takes


def test_more_virtual_stages_are_chosen_where_they_are_faster() -> None:
    """Chunks shorten the ends of a pipeline; there are none of less than half a layer, nor on a single stage."""
    costs, batches = Costs(GPT, head=50), [batch_of(*ALIKE)]
    settings = run_settings(costs, (2, 2), network=Network(inter_node_latency_us=0.0))
    assert len(choose_layer_split(settings, costs, batches, chunks=(2,))) == 4, "shorter ends"
    assert choose_layer_split(settings, costs, batches, chunks=(8,)) == choose_layer_split(settings, costs, batches)
    one = run_settings(Costs(GPT), (4,), pipeline_parallel=1)
    assert choose_layer_split(one, Costs(GPT), batches, chunks=(2, 4)) == (4,)
    costs, batches = Costs(T5, encoder=300, decoder=100), [batch_of(*[(400, 400)] * 24)]
    found = choose_layer_split(run_settings(costs, (6,) * 4, encoder_layers=12), costs, batches, chunks=(4,))
    assert found == (*(1,) * 12, *(3,) * 4), "of equal work, which moves from equal layers do not come to"


@pytest.mark.parametrize(
    ("work", "stages", "chunks", "expected"),
    [
        ([1] * 48, 4, 2, [(4, 5, 5, 6, 8, 7, 7, 6), (2, 3, 5, 6, 10, 9, 7, 6)]),
        ([*[1] * 47, 7], 4, 2, [(5, 5, 6, 6, 10, 8, 7, 1), (2, 4, 5, 7, 11, 10, 8, 1)]),
        ([2] * 24 + [1] * 48, 2, 3, [(5, 8, 8, 14, 21, 16), (3, 8, 8, 10, 27, 16)]),
        ([*[1] * 47, 25], 4, 2, []),
        ([1] * 4, 4, 2, []),
    ],
)
def test_first_chunks_of_first_ranks_are_short(work, stages, chunks, expected) -> None:
    """Of even ranks; a head worth six items is on the last rank, one worth 24 would leave its last chunk none."""
    assert tilted(work, stages, chunks) == expected


def test_the_fastest_few_splits_are_planned_as_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is searched, others follow its plans; all others have short searches, and may follow, too."""
    planned, plan = [], layer_split._plan

    def recorded(made: Planner, lengths: GlobalBatch) -> IterationPlan | None:
        planned.append((made.settings, found := plan(made, lengths)))
        return found

    monkeypatch.setattr(layer_split, "_plan", recorded)
    costs, batches = cost_model(GPT), [batch(GPT, 60, seed=seed) for seed in range(2)]
    options = run_settings(Costs(GPT), (4,) * 4, hidden_size=128, micro_batch_layouts=(BatchLayout.PACKED,))
    split = choose_layer_split(options, costs, batches)
    full = Counter[tuple[int, ...]]()
    for settings_, found in planned:
        if settings_.schedule.search_evaluations is None:
            full[settings_.modules_per_stage] += found.totals.predicted_ns
            assert bool(settings_.precedents) is (len(full) > 1)
        else:
            assert settings_.schedule.search_evaluations == layer_split.EVALUATIONS
    assert len(full) >= layer_split.FINALISTS
    assert full[options.model.modules_of(split)] == min(full.values())
    assert any(settings_.precedents for settings_, _ in planned)
    planned.clear()
    schedule = replace(options.schedule, search_evaluations=50)
    choose_layer_split(msgspec.structs.replace(options, schedule=schedule), costs, batches[:1])
    assert {settings_.schedule.search_evaluations for settings_, _ in planned} == {50}


def test_chunks_of_a_stage_are_evened_together() -> None:
    found = chosen(Costs(GPT, head=200), (3, 3, 3, 3), *ALIKE, pipeline_parallel=2, chunks=2)
    assert found[0] + found[2] == 7
