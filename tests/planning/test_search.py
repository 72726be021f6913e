"""The order search on random batches of a small model: valid, repeatable, and never slower than what it begins with."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.cost import Network, ScatterGather
from megatron_dynapipe.cost.analytic import A100_RATES, AnalyticCostModel
from megatron_dynapipe.cost.work import ModelShape
from megatron_dynapipe.plan.codec import digest
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning import search as search_module
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import ModelFamily, Recompute

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native core is not built")

GB = 10**9


def batch(samples: int, family: ModelFamily, seed: int) -> GlobalBatch:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(4.5, 1.1, samples), 2, 2000).astype(np.int32)
    targets = np.clip(random.lognormal(3, 1, samples), 1, 300).astype(np.int32)
    return GlobalBatch(
        iteration=0,
        sample_ids=np.arange(samples),
        input_lengths=lengths,
        target_lengths=targets if family is ModelFamily.T5 else np.zeros(samples, np.int32),
    )


def planner(
    family: ModelFamily, pp: int, dp: int = 1, *, chunks: int = 1, memory_gb: float = 40, **schedule
) -> Planner:
    t5 = family is ModelFamily.T5
    shape = ModelShape(family=family, hidden=1024, heads=16, kv_channels=64, ffn=4096, vocabulary=32768)
    settings = PlannerSettings(
        family=family,
        encoder_layers=12 if t5 else 24,
        decoder_layers=12 if t5 else 0,
        hidden_size=1024,
        data_parallel=dp,
        pipeline_parallel=pp,
        chunks=chunks,
        memory_limit_bytes=int(memory_gb * GB),
        recompute=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL),
        network=Network(devices_per_node=4),
        schedule=ScheduleSettings(**schedule),
    )
    return Planner(settings, AnalyticCostModel(shape, A100_RATES, max_size=64, max_length=2048))


def time_of(plan: IterationPlan) -> int:
    return plan.totals.predicted_ns


CASES = [
    (ModelFamily.GPT, 4, 1, 80, 40),
    (ModelFamily.GPT, 2, 2, 80, 40),
    (ModelFamily.GPT, 4, 1, 80, 2.2),
    (ModelFamily.GPT, 1, 1, 30, 40),
    (ModelFamily.GPT, 4, 3, 3, 40),
    (ModelFamily.T5, 4, 1, 80, 40),
    (ModelFamily.T5, 3, 2, 60, 40),
    (ModelFamily.T5, 4, 1, 1, 40),
]


@pytest.mark.parametrize(("family", "pp", "dp", "samples", "memory_gb"), CASES)
def test_a_searched_plan_is_valid_and_no_slower_than_1f1b(family, pp, dp, samples, memory_gb):
    for seed in range(2):
        given = batch(samples, family, seed)
        found = planner(family, pp, dp, memory_gb=memory_gb, search_evaluations=400).plan(given, 0)
        verify(found, expected_samples=range(samples))
        assert all(replica.micro_batches for replica in found.replicas)
        plain = planner(family, pp, dp, memory_gb=memory_gb, method="1f1b").plan(given, 0)
        assert time_of(found) <= time_of(plain)


@pytest.mark.parametrize(
    ("family", "pp", "dp", "chunks", "samples", "memory_gb"),
    [
        (ModelFamily.GPT, 4, 1, 2, 80, 40),
        (ModelFamily.GPT, 2, 2, 3, 60, 40),
        (ModelFamily.GPT, 4, 1, 2, 80, 2.6),
        (ModelFamily.T5, 3, 2, 2, 60, 40),
        (ModelFamily.T5, 2, 1, 3, 40, 40),
        (ModelFamily.T5, 4, 1, 2, 1, 40),
    ],
)
def test_virtual_stages_are_searched_too(monkeypatch, family, pp, dp, chunks, samples, memory_gb):
    """Valid, no slower than interleaved 1F1B, and the same as the Python twin's."""
    given = batch(samples, family, 0)
    made = planner(family, pp, dp, chunks=chunks, memory_gb=memory_gb, search_evaluations=200)
    found = made.plan(given, 0)
    verify(found, expected_samples=range(samples))
    plain = planner(family, pp, dp, chunks=chunks, memory_gb=memory_gb, method="1f1b").plan(given, 0)
    assert time_of(found) <= time_of(plain)
    monkeypatch.setattr(search_module, "NATIVE", None)
    assert made.plan(given, 0) == found


@pytest.mark.parametrize("family", ModelFamily)
def test_evaluations_are_searched_too(family):
    plan = planner(family, 3, 2, search_evaluations=200).plan(batch(30, family, 1), 0, forward_only=True)
    verify(plan, expected_samples=range(30))
    assert plan.forward_only and all(replica.micro_batches for replica in plan.replicas)


def test_more_evaluations_make_no_worse_plan():
    given = batch(100, ModelFamily.T5, 3)
    times = [time_of(planner(ModelFamily.T5, 4, search_evaluations=n).plan(given, 0)) for n in (0, 300, 3000)]
    assert times[1] <= times[0] and times[2] < times[0]


def test_the_same_input_gives_the_same_plan_and_another_seed_may_not():
    given = batch(60, ModelFamily.GPT, 4)
    first, again = (digest(planner(ModelFamily.GPT, 4, search_evaluations=300).plan(given, 0)) for _ in range(2))
    assert first == again
    other = planner(ModelFamily.GPT, 4, search_evaluations=300, seed=1).plan(given, 0)
    assert digest(other) != first


def test_short_memory_is_kept_to():
    given = batch(60, ModelFamily.GPT, 5)
    roomy = planner(ModelFamily.GPT, 4, search_evaluations=300).plan(given, 0)
    tight = planner(ModelFamily.GPT, 4, memory_gb=2.2, search_evaluations=300).plan(given, 0)
    modes = {mb.recompute for replica in tight.replicas for mb in replica.micro_batches}
    assert modes != {Recompute.NONE}
    assert time_of(tight) >= time_of(roomy)


SEARCHES = [
    (ModelFamily.GPT, 4, 1, 30, 40),
    (ModelFamily.GPT, 2, 2, 30, 40),
    (ModelFamily.GPT, 4, 1, 40, 2.2),
    (ModelFamily.GPT, 1, 1, 10, 40),
    (ModelFamily.T5, 3, 2, 30, 40),
    (ModelFamily.T5, 4, 1, 1, 40),
]


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("family", "pp", "dp", "samples", "memory_gb"), SEARCHES)
def test_the_python_twin_finds_the_same_plans(monkeypatch, family, pp, dp, samples, memory_gb, forward_only):
    for seed in range(2):
        made = planner(family, pp, dp, memory_gb=memory_gb, search_evaluations=250, seed=seed)
        native = made.plan(batch(samples, family, seed), 0, forward_only=forward_only)
        monkeypatch.setattr(search_module, "NATIVE", None)
        twin = made.plan(batch(samples, family, seed), 0, forward_only=forward_only)
        monkeypatch.undo()
        assert twin == native


@pytest.mark.parametrize("family", ModelFamily)
def test_messages_divided_over_tensor_parallel_ranks_cost_the_twins_the_same(monkeypatch, family):
    """Links of which some are worth dividing for, for some messages."""
    settings = msgspec.structs.replace(
        planner(family, 4, search_evaluations=60).settings,
        tensor_parallel=2,
        scatter_gather=ScatterGather.AUTO,
        network=Network(devices_per_node=4, intra_node_latency_us=20, inter_node_latency_us=50),
    )
    made = Planner(settings, planner(family, 4).cost_model)
    native = made.plan(batch(40, family, 0), 0)
    whole = Planner(msgspec.structs.replace(settings, scatter_gather=ScatterGather.OFF), made.cost_model)
    assert time_of(native) < time_of(whole.plan(batch(40, family, 0), 0))
    monkeypatch.setattr(search_module, "NATIVE", None)
    assert made.plan(batch(40, family, 0), 0) == native


def search_arguments():
    made = planner(ModelFamily.GPT, 2)
    tables = made.cost_model.tables(tensor_parallel=1, recompute=Recompute.NONE)
    ints = lambda *values: np.array(values, np.int64)  # noqa: E731
    return {
        "inputs": ints(64, 32, 32),
        "targets": ints(0, 0, 0),
        "modes": [(tables.sizes, tables.inputs, tables.targets, tables.values)],
        "chunks": 1,
        "encoder_layers": ints(12, 12),
        "decoder_layers": ints(0, 0),
        "model_state": ints(0, 0),
        "memory_limit": 40 * GB,
        "forward_only": False,
        "replicas": 1,
        "bytes_per_position": 2048,
        "decoder_forward": np.array([False]),
        "decoder_backward": np.array([False]),
        "latency_ns": np.array([0.0]),
        "gbps": np.array([100.0]),
        "cuts": [(ints(1, 2), ints(0, 0))],
        "evaluations": 50,
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("inputs", np.zeros(0, np.int64), r"between 1 and 2\^24 samples"),
        ("inputs", np.array([1, 2, -5]), r"lengths from 0 to 2\^20"),
        ("targets", np.zeros(2, np.int64), "as many target lengths as input lengths"),
        ("modes", [], "between 1 and 16 recompute modes"),
        ("encoder_layers", np.array([24]), "encoder and decoder layers of the same stages"),
        ("encoder_layers", np.array([-1, 25]), "0 to 65536 layers of a kind"),
        ("chunks", 2, "model state for every rank"),
        ("chunks", 0, "between 1 and 4096 chunks"),
        ("model_state", np.zeros(3, np.int64), "model state for every rank"),
        ("memory_limit", -1, "a memory limit from 0"),
        ("replicas", 0, "1 to 65536 replicas"),
        ("bytes_per_position", -1, "bytes per position"),
        ("decoder_forward", np.zeros(2, bool), "links between neighbouring stages"),
        ("latency_ns", np.array([0.0, 0.0]), "links between neighbouring stages"),
        ("gbps", np.zeros(0), "links between neighbouring stages"),
        ("latency_ns", np.array([-1.0]), "latencies from 0"),
        ("latency_ns", np.array([np.nan]), "latencies from 0"),
        ("gbps", np.array([0.0]), "a rate above 0 on every link"),
        ("cuts", [(np.array([1, 1]), np.array([0, 0]))], "micro-batches that add up to all samples"),
        ("cuts", [(np.array([1, 3]), np.array([0, 0]))], "micro-batches that add up to all samples"),
        ("cuts", [(np.array([0, 3]), np.array([0, 0]))], "micro-batches that add up to all samples"),
        ("cuts", [(np.array([1, 2]), np.array([0, 1]))], "modes that there are"),
        ("cuts", [(np.array([1, 2]), np.array([0]))], "a mode for every micro-batch"),
        ("evaluations", -1, "at least 0 evaluations"),
    ],
)
def test_the_native_boundary_refuses_what_does_not_fit(name, value, message):
    assert len(NATIVE.search(**search_arguments())) == 1
    with pytest.raises(ValueError, match=f"expected {message}"):
        NATIVE.search(**(search_arguments() | {name: value}))


def test_cuts_that_fit_nowhere_are_no_start():
    assert NATIVE.search(**(search_arguments() | {"memory_limit": 1000})) == []
    assert NATIVE.search(**(search_arguments() | {"cuts": []})) == []
