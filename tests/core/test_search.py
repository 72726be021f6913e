"""The order search on random batches of a small model: valid, repeatable, and never slower than what it begins with."""

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import OrderedPartitions, by_length
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.search import start
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import Network
from megatron_dynapipe.costing.analytic import A100_RATES
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import decode_plan, digest, encode
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import cost_model, of_lengths, settings
from tests.helpers.examples import examples

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
BOTH_LAYOUTS = {"micro_batch_layouts": tuple(BatchLayout)}


def batch(samples: int, family: ModelFamily, seed: int) -> GlobalBatch:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4.5, 1.1, samples), 2, 2000).astype(np.int32)
    targets = np.clip(random.lognormal(3, 1, samples), 1, 300).astype(np.int32)
    return of_lengths(lengths, targets if family is ModelFamily.T5 else None)


def planner(family, pp, dp=1, *, chunks=1, memory_gb=40.0, choices=None, **schedule) -> Planner:
    made = settings(
        family,
        encoder_layers=12 if family is T5 else 24,
        decoder_layers=12 if family is T5 else 0,
        hidden_size=1024,
        data_parallel=dp,
        pipeline_parallel=pp,
        chunks=chunks,
        memory_limit_bytes=int(memory_gb * 1e9),
        recompute=tuple(Recompute),
        network=Network(devices_per_node=4),
        schedule=ScheduleSettings(**schedule),
        **choices or {},
    )
    return planner_of(made, cost_model(family, hidden=1024, heads=16, vocabulary=32768, rates=A100_RATES, max_size=64))


@pytest.mark.parametrize(
    ("family", "pp", "dp", "chunks", "samples", "memory_gb"),
    [
        (GPT, 4, 1, 1, 80, 40),
        (GPT, 2, 2, 1, 80, 40),
        (GPT, 4, 1, 1, 80, 2.45),
        (GPT, 1, 1, 1, 30, 40),
        (GPT, 4, 3, 1, 3, 40),
        (T5, 4, 1, 1, 80, 40),
        (T5, 3, 2, 1, 60, 40),
        (T5, 4, 1, 1, 1, 40),
        (GPT, 4, 1, 2, 80, 40),
        (GPT, 2, 2, 3, 60, 40),
        (GPT, 4, 1, 2, 80, 2.85),
        (T5, 3, 2, 2, 60, 40),
        (T5, 2, 1, 3, 40, 40),
        (T5, 4, 1, 2, 1, 40),
    ],
)
def test_a_searched_plan_is_valid_and_no_slower_than_1f1b(family, pp, dp, chunks, samples, memory_gb):
    layout = {"chunks": chunks, "memory_gb": memory_gb}
    for seed in range(2):
        lengths = batch(samples, family, seed)
        found = planner(family, pp, dp, search_evaluations=300, **layout).plan(lengths, 0)
        verify(found, expected_samples=range(samples))
        assert all(replica.micro_batches for replica in found.replicas)
        plain = planner(family, pp, dp, method="1f1b", search_evaluations=300, **layout).plan(lengths, 0)
        assert found.totals.predicted_ns <= plain.totals.predicted_ns * (1.02 if memory_gb < 40 else 1)


def test_more_evaluations_make_no_worse_plan():
    plans = [planner(T5, 4, search_evaluations=n).plan(batch(100, T5, 3), 0) for n in (0, 300, 3000)]
    times = [plan.totals.predicted_ns for plan in plans]
    assert times[1] <= times[0] and times[2] < times[0]


@pytest.mark.parametrize("family", [GPT, T5])
def test_one_stage_is_not_searched_and_loses_next_to_nothing(family):
    """Nobody waits for anybody there: rows of least work are all there is to find."""
    unsearched, default, searched = (
        planner(family, 1, memory_gb=60, choices=BOTH_LAYOUTS, **schedule).plan(batch(100, family, 3), 0)
        for schedule in ({"search_evaluations": 0}, {}, {"search_evaluations": 3000})
    )
    assert default.replicas == unsearched.replicas
    assert default.totals.predicted_ns <= 1.005 * searched.totals.predicted_ns


@pytest.mark.parametrize(("chunks", "memory_gb"), [(1, 2.45), (2, 2.85)])
def test_stages_that_hold_fewer_micro_batches_keep_more_of_each(chunks, memory_gb):
    """Memory is short on the first stage; one mode on all stages takes longer."""
    made = planner(GPT, 4, chunks=chunks, memory_gb=memory_gb, choices=BOTH_LAYOUTS)
    plan = decode_plan(encode(made.plan(batch(80, GPT, 0), 0)))
    verify(plan, expected_samples=range(80))
    (replica,) = plan.replicas
    kept = np.array([mb.stored_bytes for mb in replica.micro_batches]).sum(axis=0)
    assert any(len(set(mb.recompute)) > 1 for mb in replica.micro_batches)
    assert kept[-1] > kept[0]


def test_a_beginning_is_known_not_to_be_as_fast_as_asked():
    made = planner(GPT, 4, choices=BOTH_LAYOUTS)
    samples = made.samples(batch(60, GPT, 0))
    rows = OrderedPartitions(order=by_length(samples.inputs, samples.targets), partitions=())
    problem = made.problem(samples)
    begun = start(problem, rows)
    assert begun is not None and start(problem, rows, begun.makespan_ns) == begun
    assert 0 < begun.rows < 60 and start(problem, rows, begun.makespan_ns // 2) is None


def test_another_seed_may_give_another_plan():
    lengths = batch(60, ModelFamily.GPT, 4)
    assert len({digest(planner(GPT, 4, search_evaluations=300, seed=seed).plan(lengths, 0)) for seed in (0, 1)}) == 2


PACKED = {"micro_batch_layouts": (BatchLayout.PACKED,)}
SIMPLER = [{"memory_gb": 0.9}, {"memory_gb": 0.97}, {"split_backward": "off"}, {"evaluations": 300}, PACKED]
OF_GPT = [{"slices": "off"}, {"slices": 256}]


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    family = draw(st.sampled_from([GPT, T5]))
    simpler = draw(st.sampled_from(SIMPLER if family is T5 else SIMPLER + OF_GPT))
    memory_gb = draw(st.sampled_from([2.5, 3.0, 4.0]))
    return family, draw(st.integers(1, 2)), draw(st.integers(8, 40)), draw(st.integers(0, 9999)), memory_gb, simpler


def longer(case: tuple) -> float:
    """How much longer the plan takes than in less memory or with fewer choices; nothing fits then: not at all."""
    family, chunks, samples, seed, memory, simpler = case
    everything = BOTH_LAYOUTS | {"split_backward": "auto", "slices": "auto" if family is GPT else "off"}

    def predicted(memory_gb=1.0, evaluations=None, **changes):
        limits = {"memory_gb": memory_gb * memory, "search_evaluations": evaluations}
        made = planner(family, 4, chunks=chunks, choices=everything | changes, **limits)
        return made.plan(batch(samples, family, seed), 0).totals.predicted_ns

    try:
        limit = predicted(**simpler)
    except InfeasibleError:
        return 0
    return predicted() / limit


@given(cases())
@hypothesis.settings(max_examples=examples(8))
def test_no_plan_is_much_slower_than_in_less_memory_or_with_fewer_choices(case):
    """Of 2,447 such pairs 19 took more than 1.02 times as long, the most 1.062; cliffs took 1.3 to 3 times.

    Runs differ: Hypothesis also draws numbers that stand in whatever modules are loaded.
    """
    assert longer(case) <= 1.2


def test_plans_that_once_were_slower_than_simpler_ones_are_not():
    assert longer((GPT, 1, 26, 546, 4.0, {"split_backward": "off"})) <= 1  # full to the brim with divided passes
    assert longer((GPT, 2, 24, 5142, 4.0, {"memory_gb": 0.97})) <= 1  # pieces ahead where searches begin
    assert longer((T5, 1, 38, 2276, 3.0, {"evaluations": 300})) <= 1  # modes by stage alone let two rows fit
    assert longer((GPT, 2, 24, 1745, 4.0, {"memory_gb": 0.9})) <= 1  # the head's scores leave one row too little
