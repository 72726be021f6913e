"""The order search on random batches of a small model: valid, repeatable, and never slower than what it begins with."""

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.cost import Network
from megatron_dynapipe.cost.analytic import A100_RATES
from megatron_dynapipe.errors import InfeasibleError
from megatron_dynapipe.plan.codec import decode_plan, digest, encode
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning import search as search_module
from megatron_dynapipe.planning.native import NEVER
from megatron_dynapipe.planning.partition import OrderedPartitions, Partition, by_length
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.search import begun_ns, default_evaluations
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout, ModelFamily, Recompute
from tests.planning.planner_cases import cost_model, of_lengths, settings

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
GB = 10**9


def batch(samples: int, family: ModelFamily, seed: int) -> GlobalBatch:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4.5, 1.1, samples), 2, 2000).astype(np.int32)
    targets = np.clip(random.lognormal(3, 1, samples), 1, 300).astype(np.int32)
    return of_lengths(lengths, targets if family is ModelFamily.T5 else None)


def planner(
    family: ModelFamily, pp: int, dp: int = 1, *, chunks: int = 1, memory_gb: float = 40, **schedule
) -> Planner:
    made = settings(
        family,
        encoder_layers=12 if family is T5 else 24,
        decoder_layers=12 if family is T5 else 0,
        hidden_size=1024,
        data_parallel=dp,
        pipeline_parallel=pp,
        chunks=chunks,
        memory_limit_bytes=int(memory_gb * GB),
        recompute=tuple(Recompute),
        network=Network(devices_per_node=4),
        schedule=ScheduleSettings(**schedule),
    )
    return Planner(made, cost_model(family, hidden=1024, heads=16, vocabulary=32768, rates=A100_RATES, max_size=64))


def time_of(plan: IterationPlan) -> int:
    return plan.totals.predicted_ns


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
        assert time_of(found) <= time_of(plain) * (1.02 if memory_gb < 40 else 1)


def test_more_evaluations_make_no_worse_plan():
    lengths = batch(100, ModelFamily.T5, 3)
    times = [time_of(planner(ModelFamily.T5, 4, search_evaluations=n).plan(lengths, 0)) for n in (0, 300, 3000)]
    assert times[1] <= times[0] and times[2] < times[0]


@pytest.mark.parametrize(("chunks", "memory_gb"), [(1, 2.45), (2, 2.85)])
def test_stages_that_hold_fewer_micro_batches_keep_more_of_each(chunks, memory_gb):
    """Memory is short on the first stage; one mode on all stages takes longer."""
    lengths, made = batch(80, GPT, 0), planner(GPT, 4, chunks=chunks, memory_gb=memory_gb)
    made = Planner(msgspec.structs.replace(made.settings, micro_batch_layouts=tuple(BatchLayout)), made.cost_model)
    plan = decode_plan(encode(made.plan(lengths, 0)))
    verify(plan, expected_samples=range(80))
    (replica,) = plan.replicas
    kept = np.array([mb.stored_bytes for mb in replica.micro_batches]).sum(axis=0)
    assert any(len(set(mb.recompute)) > 1 for mb in replica.micro_batches)
    assert kept[-1] > kept[0]


def test_a_beginning_is_known_not_to_be_as_fast_as_asked():
    made = planner(GPT, 4)
    made = Planner(msgspec.structs.replace(made.settings, micro_batch_layouts=tuple(BatchLayout)), made.cost_model)
    samples = made.samples(batch(60, GPT, 0))
    rows, problem = (
        OrderedPartitions(order=by_length(samples.inputs, samples.targets), partitions=()),
        made.problem(samples),
    )
    begun = begun_ns(problem, rows, NEVER)
    assert begun_ns(problem, rows, begun) == begun < NEVER == begun_ns(problem, rows, begun // 2)


def test_another_seed_may_give_another_plan():
    lengths = batch(60, ModelFamily.GPT, 4)
    assert len({digest(planner(GPT, 4, search_evaluations=300, seed=seed).plan(lengths, 0)) for seed in (0, 1)}) == 2


def test_evaluations_scale_down_with_large_batches_which_is_said_once(caplog, monkeypatch):
    partitions = [Partition(sizes=np.ones(n, np.int64), modes=np.zeros(n, np.int64)) for n in (10, 300, 3000, 30_000)]
    numbers = [default_evaluations([partition], replicas=1, chunks=1) for partition in partitions]
    assert numbers == [8000, 2500, 2500, 250]
    assert default_evaluations(partitions, replicas=2, chunks=2) == 250
    monkeypatch.setattr(search_module, "LARGE_BUDGET", 500)
    search_module.notice.cache_clear()
    for _ in range(2):
        planner(ModelFamily.GPT, 2).plan(batch(60, ModelFamily.GPT, 0), 0)
    assert [record.message for record in caplog.records] == [
        "notice: large batches are searched with fewer evaluations than 2500, so that they take seconds"
    ]


PACKED = {"micro_batch_layouts": (BatchLayout.PACKED,)}
SIMPLER = [{"memory_gb": 0.9}, {"memory_gb": 0.97}, {"split_backward": "off"}, {"evaluations": 300}, PACKED]
OF_GPT = [{"slices": "off"}, {"slices": 256}]


@st.composite
def cases(draw: st.DrawFn) -> tuple:
    family = draw(st.sampled_from([GPT, T5]))
    simpler = draw(st.sampled_from(SIMPLER if family is T5 else SIMPLER + OF_GPT))
    memory_gb = draw(st.sampled_from([2.5, 3.0, 4.0]))
    return family, draw(st.integers(1, 2)), draw(st.integers(8, 40)), draw(st.integers(0, 9999)), memory_gb, simpler


@given(cases())
@hypothesis.example((GPT, 1, 26, 546, 4.0, {"split_backward": "off"}))  # full to the brim with divided passes
@hypothesis.example((GPT, 2, 24, 5142, 4.0, {"memory_gb": 0.97}))  # pieces ahead where searches begin
@hypothesis.example((T5, 1, 38, 2276, 3.0, {"evaluations": 300}))  # modes by stage alone let two rows fit
@hypothesis.settings(max_examples=8)
def test_no_plan_is_much_slower_than_in_less_memory_or_with_fewer_choices(case):
    """Of 2,391 such pairs eleven took more than 1.02 times as long, the most 1.093; cliffs took 1.3 to 3 times."""
    family, chunks, samples, seed, memory, simpler = case
    lengths, slices = batch(samples, family, seed), "auto" if family is GPT else "off"
    everything = {"split_backward": "auto", "slices": slices, "micro_batch_layouts": tuple(BatchLayout)}

    def predicted(memory_gb=1.0, evaluations=None, **changes):
        made = planner(family, 4, chunks=chunks, memory_gb=memory_gb * memory, search_evaluations=evaluations)
        settings = msgspec.structs.replace(made.settings, **everything | changes)
        return time_of(Planner(settings, made.cost_model).plan(lengths, 0))

    try:
        limit = predicted(**simpler)
    except InfeasibleError:
        return
    assert predicted() <= 1.1 * limit
