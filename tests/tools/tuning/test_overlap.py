"""What passes hide of reduction and gathering: by hand, and in a search that plans everything."""

import msgspec
import pytest

from megatron_dynapipe.core.costs import ATTENTION, ModelState
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.tools.tuning import Space, TunedLayout, overlap, tune
from megatron_dynapipe.tools.tuning.evaluate import Reduction, StepRates
from megatron_dynapipe.tools.tuning.overlap import (
    EdgePasses,
    buckets,
    edge_passes,
    exposed_gathering_ns,
    exposed_reduction_ns,
)
from tests.core.planner_cases import cost_model
from tests.helpers.plans import make_plan
from tests.tools.tuning.test_tuning import base, batch

GPT = ModelFamily.GPT
ONE = EdgePasses(first=(((0, 100),),), last=(((800, 1000),),), end_ns=1000)
"""One stage: a first forward of 100 ns, a last backward of 200."""
TWO = EdgePasses(first=(((0, 100),), ((120, 220),)), last=(((800, 1000),), ((500, 700),)), end_ns=1000)


@pytest.mark.parametrize(
    ("edges", "counts", "reduction", "exposed"),
    [
        (ONE, (1,), 400, 400),  # nothing before the whole gradient is there
        (ONE, (4,), 400, 250),  # the first fourth is ready after 50 of 200 ns: 850 + 400
        (ONE, (4,), 100, 25),  # the last fourth, after the pass
        (ONE, (4,), 0, 0),
        (TWO, (4, 1), 400, 250),  # the second stage ends at 1100
        (TWO, (4, 1), 100, 25),
        (TWO, (400, 1), 250, 52),  # the first stage's: 800 + 0.5 + 250, of the second 950
    ],
)
def test_a_reduction_ends_after_its_last_bucket(edges, counts, reduction, exposed) -> None:
    found = exposed_reduction_ns(edges, reduction, counts)
    assert found == pytest.approx(exposed, abs=2)


@pytest.mark.parametrize(
    ("edges", "counts", "gathering", "exposed"),
    [
        (ONE, (1,), 400, 400),
        (ONE, (4,), 400, 325),  # the last bucket is there at 400, and its part of the pass would begin at 75
        (ONE, (4,), 80, 20),  # the first bucket alone
        (TWO, (4, 1), 80, 20),
        (TWO, (8, 1), 150, 62),  # 150 - 87.5 on the first stage, 150 - 120 on the second
    ],
)
def test_a_forward_waits_for_its_parameters(edges, counts, gathering, exposed) -> None:
    assert exposed_gathering_ns(edges, gathering, counts) == pytest.approx(exposed, abs=1)


def test_several_chunks_reduce_one_after_another() -> None:
    edges = EdgePasses(first=(((0, 10), (20, 30)),), last=(((700, 800), (900, 1000)),), end_ns=1000)
    assert exposed_reduction_ns(edges, 300, (1,)) == 150  # the first chunk's 150 is done at 950, the other's at 1150
    assert exposed_gathering_ns(edges, 300, (1,)) == 280


def test_the_first_stage_alone_has_several_buckets() -> None:
    assert buckets(100_000_000, 8, 0) == 3 and buckets(100_000_000, 8, 1) == 1 and buckets(10, 8, 0) == 1
    assert buckets(300_000_000, 100, 0) == 3, "a million for each replica"


@pytest.mark.parametrize("chunks", [1, 2])
def test_edges_of_a_plan_are_its_first_forwards_and_last_backwards(chunks: int) -> None:
    plan = make_plan((4,), 2, chunks=chunks)
    edges = edge_passes(plan)
    assert [len(of) for of in edges.first] == [len(of) for of in edges.last] == [chunks] * 2
    assert edges.first[0][0][0] == 0
    events = plan.replicas[0].stages[0].predicted
    assert edges.last[0][-1][1] == max(event.end_ns for event in events if hasattr(event.instruction, "chunk"))
    for first, last in zip(edges.first, edges.last, strict=True):
        assert first[0][1] <= last[-1][0]


def test_a_search_counts_what_is_not_hidden(monkeypatch) -> None:
    """Every layout's time is that of its passes, of what these do not hide, and of the step; the best is first."""
    monkeypatch.setattr(overlap, "LEAST_BUCKET", 50_000)
    monkeypatch.setattr(overlap, "BUCKET_OF_REPLICA", 1)
    batches, space = [batch(GPT, 16)], Space(devices=4)
    overlapped = StepRates(overlaps_reduction=True, overlaps_gathering=True)
    whole, hidden = (
        tune(base(GPT), cost_model(GPT), batches, space, rates=rates, top=99).layouts
        for rates in (StepRates(), overlapped)
    )

    def key(layout: TunedLayout) -> tuple:
        sizes = layout.data_parallel, layout.tensor_parallel, layout.pipeline_parallel
        return *sizes, layout.layers_per_stage, layout.chunks

    plain = {key(layout): layout for layout in whole if layout.predicted_ms is not None}
    planned = [layout for layout in hidden if layout.predicted_ms is not None]
    times = [layout.predicted_ms for layout in planned]
    assert len(planned) == len(plain) > 3 and times == sorted(times)
    for layout in planned:
        before = plain[key(layout)]
        assert before.hidden_ms == 0
        assert layout.predicted_ms == pytest.approx(before.predicted_ms - layout.hidden_ms)
        assert layout.reduction_ms + layout.hidden_ms == pytest.approx(before.reduction_ms)
    assert any(layout.hidden_ms > 0 for layout in planned)


def test_the_least_is_below_what_any_plan_exposes() -> None:
    state = ModelState(embedding_bytes=400_000_000, modules={ATTENTION: 200_000_000})
    for stages in (1, 2):
        settings = base(GPT, data_parallel=4, pipeline_parallel=stages, distributed_optimizer=True)
        reduction = Reduction.of(settings, state, StepRates(overlaps_reduction=True, overlaps_gathering=True))
        assert reduction.buckets[0] > 1 and reduction.gathering_ns * 2 == pytest.approx(reduction.reduction_ns, abs=2)
        edges = ONE if stages == 1 else TWO
        assert reduction.least_ns <= reduction.exposed_ns(edges)
        assert (reduction.least_ns > 0) == (stages == 1)
        apart = msgspec.structs.replace(reduction, overlaps_reduction=False, overlaps_gathering=False)
        assert apart.least_ns == apart.exposed_ns(edges) == reduction.reduction_ns + reduction.gathering_ns
