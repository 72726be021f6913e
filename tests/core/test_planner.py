"""The planner end to end: valid plans for any batch, the same ones everywhere, and errors that say what to do."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import ConfigError, CostModelError, DataError, InfeasibleError, PlanningError
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import ScatterGather
from megatron_dynapipe.store.codec import decode_plan, digest, encode
from megatron_dynapipe.ways.rivals.settings import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import batch, batch_of, cost_model, of_lengths, planner, settings
from tests.core.simulate_oracle import simulate_in_python
from tests.helpers.examples import examples

FAMILIES = list(ModelFamily)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="two stages"),
        pytest.param({"pipeline_parallel": 1}, id="one stage"),
        pytest.param({"pipeline_parallel": 4, "data_parallel": 3}, id="replicas"),
        pytest.param({"pipeline_parallel": 2, "chunks": 2}, id="chunks"),
        pytest.param({"distributed_optimizer": True, "data_parallel": 2}, id="distributed optimizer"),
        pytest.param({"memory_limit_bytes": 60_000_000}, id="little memory"),
    ],
)
@pytest.mark.parametrize("samples", [3, 40])
@pytest.mark.parametrize("forward_only", [False, True])
def test_plans_are_valid(family: ModelFamily, changes: dict[str, Any], samples: int, forward_only: bool) -> None:
    lengths = batch(family, samples)
    plan = planner(family, **changes).plan(lengths, 7, forward_only=forward_only)
    verify(plan, expected_samples=lengths.sample_ids.tolist())
    assert plan.iteration == 7
    assert len(plan.replicas) == changes.get("data_parallel", 1)
    assert all(replica.micro_batches for replica in plan.replicas)


@pytest.mark.parametrize("chunks", [1, 2])
def test_embedding_and_head_on_stages_of_their_own(chunks: int) -> None:
    split = (0, 2, 2, 0)
    alone = planner(ModelFamily.GPT, pipeline_parallel=4 // chunks, chunks=chunks, layers_per_stage=split)
    plan = alone.plan(batch(ModelFamily.GPT, 20), 0)
    verify(plan)
    passes = [event for event in plan.replicas[0].stages[0].predicted if event.instruction.chunk == 0]
    assert passes and {event.end_ns - event.start_ns for event in passes} == {0}


@pytest.mark.parametrize("changes", [{}, {"chunks": 2}, {"data_parallel": 2}])
def test_a_plan_read_back_has_the_times_of_its_labels(changes: dict[str, Any]) -> None:
    """Its micro-batches say all that their costs depend on; both simulators find the time that the plan has."""
    labelled = planner(ModelFamily.GPT, micro_batch_layouts=tuple(BatchLayout), **changes)
    lengths = batch(ModelFamily.GPT, 30)
    lengths = replace(lengths, labels=lengths.input_lengths // 3)
    plan = decode_plan(encode(labelled.plan(lengths, 0)))
    for replica in plan.replicas:
        batches = replica.micro_batches
        tokens, labels = (
            np.concatenate(column) for column in zip(*((b.input_lengths, b.labels) for b in batches), strict=True)
        )
        problem = labelled.problem(labelled.samples(replace(of_lengths(tokens), labels=labels)))
        members = np.split(np.arange(len(tokens)), np.cumsum([len(b.sample_ids) for b in batches])[:-1])
        modes = np.array([[labelled.settings.recompute.index(mode) for mode in b.recompute] for b in batches])
        costs, _ = problem.costs_of(members, [b.layout for b in batches], modes)
        order = tuple(tuple(i for i in stage.instructions if isinstance(i, Pass)) for stage in replica.stages)
        assert [run(costs, order).makespan_ns for run in (simulate, simulate_in_python)] == [replica.predicted_ns] * 2


@pytest.mark.parametrize("layouts", [(BatchLayout.PACKED,), (BatchLayout.PADDED,), tuple(BatchLayout)])
@pytest.mark.parametrize("seed", range(3))
def test_labels_are_even_over_replicas(layouts: tuple[BatchLayout, ...], seed: int) -> None:
    """Samples are equally long, and half of them have no more than one label: the last stages' time is in labels."""
    many = 190
    labels = np.random.default_rng(seed).permutation(np.repeat([many, 1], 12)).astype(np.int32)
    lengths = replace(of_lengths([200] * 24), labels=labels)
    plan = planner(ModelFamily.GPT, data_parallel=2, micro_batch_layouts=layouts).plan(lengths, 0)
    first, second = (sum(sum(each.labels) for each in replica.micro_batches) for replica in plan.replicas)
    assert abs(first - second) < many / 2


IN_STEP = {"replicas_in_step": 2}


@pytest.mark.parametrize(
    ("lengths", "changes", "busy"),
    [
        ([95], {}, 1),
        ([95, 1], {}, 2),
        ([400, 30, 3, 2], {}, 4),
        ([900, 900, 900, 2, 2, 2], {"data_parallel": 6}, 6),
        ([95], {"micro_batch_layouts": (BatchLayout.PADDED,)}, 1),
        ([95, 40, 30], {"pipeline_parallel": 1}, 3),
        ([95], IN_STEP, 2),  # its neighbour runs a filler in step with it
        ([95, 40, 30], IN_STEP, 4),
    ],
)
@pytest.mark.parametrize("forward_only", [False, True])
def test_few_samples_go_to_replicas_of_their_own_and_others_are_idle(
    lengths: list[int], changes: dict[str, Any], busy: int, forward_only: bool
) -> None:
    samples = of_lengths(lengths)
    chosen = {"data_parallel": 4, "micro_batch_layouts": (BatchLayout.PACKED,)} | changes
    plan = planner(ModelFamily.GPT, **chosen).plan(samples, 0, forward_only=forward_only)
    verify(plan, expected_samples=samples.sample_ids.tolist())
    counts = [len(replica.micro_batches) for replica in plan.replicas]
    assert len(counts) == chosen["data_parallel"]
    assert all(counts[:busy]) and not any(counts[busy:])


@given(
    st.lists(st.one_of(st.integers(2, 12), st.integers(100, 1000)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([(BatchLayout.PACKED,), tuple(BatchLayout)]),
    st.sampled_from([10**11, 55_000_000]),
)
@hypothesis.settings(max_examples=examples(40))
def test_packed_rows_for_any_lengths_on_any_replicas(lengths, replicas, layouts, memory) -> None:
    samples = of_lengths(lengths)
    free = planner(ModelFamily.GPT, data_parallel=replicas, micro_batch_layouts=layouts, memory_limit_bytes=memory)
    plan = free.plan(samples, 0)
    verify(plan, expected_samples=samples.sample_ids.tolist())
    assert sum(bool(replica.micro_batches) for replica in plan.replicas) == min(len(lengths), replicas)


DIGEST = """
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.core.units import ModelFamily
from tests.core.planner_cases import batch, planner
from tests.helpers.examples import examples
for family in ModelFamily:
    print(digest(planner(family, data_parallel=2).plan(batch(family, 60), 0)))
"""


def test_the_same_plan_in_every_process() -> None:
    here = [digest(planner(f, data_parallel=2).plan(batch(f, 60), 0)) for f in FAMILIES]
    again = [digest(planner(f, data_parallel=2).plan(batch(f, 60), 0)) for f in FAMILIES]
    elsewhere = subprocess.run(
        [sys.executable, "-c", DIGEST],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert here == again == elsewhere.stdout.split()


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_per_stage": (2.5, 1.5)},
        {"encoder_layers": 8},
        {"expert_imbalance": 2.0},
        {"label_experts": True},
        {"split_backward": "auto"},
    ],
    ids=str,
)
def test_every_setting_is_part_of_the_digest(changes: dict[str, Any]) -> None:
    """Some were left out where no plan was thought to depend on them."""
    assert planner(ModelFamily.GPT, **changes).digest != planner(ModelFamily.GPT).digest


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_are_the_same_after_they_have_travelled_as_json(family: ModelFamily) -> None:
    made = settings(family, layers_per_stage=(3.5, 0.5) if family is ModelFamily.GPT else (5.5, 2.5))
    assert msgspec.json.decode(msgspec.json.encode(made), type=PlannerSettings) == made


def test_another_split_has_its_own_number_of_virtual_stages() -> None:
    made = settings(ModelFamily.GPT).with_layers_per_stage((1, 1.5, 1, 0.5))
    assert (made.modules_per_stage, made.chunks) == ((2, 3, 2, 1), 2)
    with pytest.raises(ConfigError, match=r"layer split of 4 layers .*, got \[1, 1\] of 2"):
        made.with_layers_per_stage((1, 1))


def test_settings_and_costs_are_part_of_the_digest() -> None:
    base = planner(ModelFamily.GPT)
    assert base.digest == planner(ModelFamily.GPT).digest
    assert base.digest != planner(ModelFamily.GPT, data_parallel=2).digest
    assert base.digest != planner_of(base.settings, cost_model(ModelFamily.GPT, max_length=1024)).digest


EMPTY = of_lengths([])
GPT, T5 = ModelFamily.GPT, ModelFamily.T5
PACKED = {"micro_batch_layouts": (BatchLayout.PACKED,)}
SHORT = {"memory_limit_bytes": 25_000_000, "recompute": (Recompute.NONE,)}
TOO_LONG = r"sample 1 of padded shape 1x3000\+16 lies outside the cost model's lengths, which end at 2048 and 2048"
TOO_LARGE = r"sample 1 of padded shape 1x2000 needs \d+ MB of activations on stage \d, which has \d+ MB"


@pytest.mark.parametrize(
    ("family", "changes", "samples", "error", "message"),
    [
        (GPT, {}, EMPTY, PlanningError, "expected at least one sample in a global batch, got none"),
        (GPT, {}, batch_of((9, 0), (0, 0)), DataError, "sample 1 has 0 input and 0 target"),
        (T5, {}, batch_of((9, 0)), DataError, "sample 0 has 9 input and 0 target"),
        (T5, {}, batch_of((9, 9), (3000, 9)), InfeasibleError, TOO_LONG),
        (GPT, SHORT, batch_of((9, 0), (2000, 0)), InfeasibleError, TOO_LARGE),
        (GPT, PACKED, batch_of((9, 0), (4000, 0)), InfeasibleError, "sample 1 of padded shape 1x4000 lies outside"),
    ],
)
def test_what_cannot_be_planned(family, changes, samples, error, message):
    with pytest.raises(error, match=message):
        planner(family, **changes).plan(samples, 0)


def test_a_length_that_no_device_holds_is_told_from_one_beyond_the_costs() -> None:
    costs = cost_model(GPT, hidden=4096, heads=128, max_length=2**17)
    large = planner_of(settings(GPT, hidden_size=4096, pipeline_parallel=1, memory_limit_bytes=10**12), costs)
    with pytest.raises(InfeasibleError, match="sample 0 of padded shape 1x100000 has no costs: at that length a layer"):
        large.plan(batch_of((100_000, 0)), 0)


@pytest.mark.parametrize("slices", ["auto", 4096])
def test_a_sample_is_refused_for_what_its_pieces_keep_together(slices: Any) -> None:
    """It has no costs whole, and in pieces too many logits: they are kept until the last piece has run."""
    costs = cost_model(GPT, vocabulary=128_000, max_length=2**17)
    limits = {"memory_limit_bytes": 20 * 10**9, "micro_batch_layouts": tuple(BatchLayout), "slices": slices}
    with pytest.raises(InfeasibleError) as caught:
        planner_of(settings(GPT, **limits), costs).plan(batch_of((300, 0), (100_001, 0)), 0)
    found = re.fullmatch(
        r"sample 1 of 100000 positions needs (\d+) MB of (\d+) MB left after its model state on stage 1, which keeps"
        r" all of its \d+ pieces until the last one has run, and has messages to hold, too; the last stage keeps all"
        r" logits",
        caught.value.message,
    )
    assert found and int(found[1]) > int(found[2]) > 19_000
    assert "tensor parallelism" in str(caught.value.hint)


def test_model_state_larger_than_memory() -> None:
    with pytest.raises(
        InfeasibleError, match=r"stage \d needs \d+ MB for parameters, gradients and optimizer state, of 1 MB"
    ):
        planner(ModelFamily.GPT, memory_limit_bytes=1_000_000)


def test_a_cost_model_of_another_family() -> None:
    with pytest.raises(CostModelError, match="expected a cost model of a gpt model, got analytic t5"):
        planner_of(settings(ModelFamily.GPT), cost_model(ModelFamily.T5))


def of(algorithm: str) -> PartitionSettings:
    return PartitionSettings(algorithm=PartitionAlgorithm(algorithm))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": ()}, "one or more different recompute modes"),
        ({"recompute": (Recompute.FULL, Recompute.FULL)}, "one or more different recompute modes"),
        ({"pipeline_parallel": 2, "layers_per_stage": (2, 1, 1)}, "2 × 1 virtual stages, got a layer split of 3"),
        ({"tensor_parallel": 16, "sequence_parallel": True}, "tensor-parallel size that divides 8, got 16"),
        ({"scatter_gather": ScatterGather.ON}, "ranks that hold equal outputs to divide messages over, got one rank"),
        (
            {"scatter_gather": ScatterGather.ON, "tensor_parallel": 2, "sequence_parallel": True},
            "to divide messages over, got parts of the sequence on each",
        ),
        ({"micro_batch_layouts": ()}, "expected one or two different layouts"),
        ({"micro_batch_layouts": (BatchLayout.PADDED,) * 2}, "expected one or two different layouts"),
        ({"partition": of("packed_rows")}, "allow packed micro-batches, which the partition makes, got padded"),
        ({"partition": of("uniform")} | PACKED, "allow padded micro-batches, which the partition makes, got packed"),
    ],
)
def test_settings_that_cannot_be_honoured(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(ModelFamily.GPT, **changes)
