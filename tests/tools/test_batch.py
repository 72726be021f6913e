"""Batches of other trainers, planned by one function."""

import json

import numpy as np
import pytest

from megatron_dynapipe import plan_batch
from megatron_dynapipe.core.errors import ConfigError, CostModelError, PlanningError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.ways.rivals.settings import PartitionAlgorithm, PartitionSettings

SHAPE = {"hidden": 256, "heads": 8, "kv_channels": 32, "ffn": 1024, "vocabulary": 1000}
LENGTHS = [int(n) for n in np.random.default_rng(0).lognormal(4.5, 1, 61).clip(8, 1000)]
ONE_BY_ONE = {"partition": PartitionSettings(algorithm=PartitionAlgorithm.UNIFORM, micro_batch_size=1)}
ONE_BY_ONE |= {"micro_batch_layouts": ("padded",)}
LAYOUT = {"layers": 8, "memory_mb": 4000, "pipeline_parallel": 2, "data_parallel": 4}


def costs(family: ModelFamily = ModelFamily.GPT) -> AnalyticCostModel:
    return AnalyticCostModel(ModelShape(family=family, **SHAPE), A100_RATES)


def test_every_sample_runs_once_and_every_pass_is_ordered() -> None:
    planned = plan_batch(LENGTHS, costs(), **LAYOUT)
    assert sorted(i for replica in planned.samples for one in replica for i in one) == list(range(len(LENGTHS)))
    for replica, stages in zip(planned.samples, planned.passes, strict=True):
        every = sorted([f"F{i}" for i in range(len(replica))] + [f"B{i}" for i in range(len(replica))])
        assert [sorted(stage) for stage in stages] == [every] * 2
    assert planned.predicted_ms > 0


def test_replicas_in_step_have_equal_counts_and_like_positions() -> None:
    free, planned = plan_batch(LENGTHS, costs(), **LAYOUT), plan_batch(LENGTHS, costs(), equal_counts=True, **LAYOUT)
    assert len({len(replica) for replica in planned.samples}) == 1 and len(set(planned.passes)) == 1
    assert sorted(i for replica in planned.samples for one in replica for i in one) == list(range(len(LENGTHS)))
    assert free.predicted_ms <= planned.predicted_ms < 1.3 * free.predicted_ms
    work = [[sum(LENGTHS[i] for i in one) for one in position] for position in zip(*planned.samples, strict=True)]
    assert sum(map(max, work)) < 1.2 * sum(LENGTHS) / 4
    pairs, layout = [(n, n // 4 + 3) for n in LENGTHS], LAYOUT | {"layers": (4, 4)}
    planned = plan_batch(pairs, costs(ModelFamily.T5), equal_counts=True, **layout)
    assert len({len(replica) for replica in planned.samples}) == 1


def test_layers_are_split_as_they_are_counted() -> None:
    equal, uneven = (
        plan_batch([600] * 4, costs(), **LAYOUT, **split).micro_batches[0][0].stored_bytes
        for split in ({}, {"layers_per_stage": [1.5, 6.5]})
    )
    assert equal[0] > 2 * uneven[0] and equal[1] < uneven[1]
    with pytest.raises(ConfigError, match=r"layer split of 8 layers .*, got \[6, 1\] of 7"):
        plan_batch(LENGTHS, costs(), **LAYOUT, layers_per_stage=(6, 1))
    with pytest.raises(CostModelError, match=r"costs of a model with experts in layers \[1, 3\]"):
        plan_batch(LENGTHS, costs(), **LAYOUT, expert_layers=(1, 3))


def test_pairs_may_be_those_of_json() -> None:
    layout, model = LAYOUT | {"layers": (4, 4)}, costs(ModelFamily.T5)
    pairs = [(n, n // 4 + 3) for n in LENGTHS]
    planned = plan_batch(pairs, model, **layout)
    for same in (json.loads(json.dumps(pairs)), np.array(pairs)):
        assert plan_batch(same, model, **layout) == planned


@pytest.mark.parametrize(
    ("lengths", "changes", "error", "said"),
    [
        ([10, 20, 30], {}, PlanningError, "3 samples cannot be divided into equally many"),
        ([900] * 5, ONE_BY_ONE, PlanningError, "5 samples cannot be divided into equally many"),
        (
            LENGTHS,
            {"stages": 2},
            ConfigError,
            "expected settings among layers_per_stage, expert_layers, hidden_size, .*, got stages",
        ),
        (
            LENGTHS,
            {"slices": 256, "replicas_in_step": 2},
            ConfigError,
            "got replicas_in_step, slices\nhint: samples are",
        ),
        (LENGTHS, {"memory_mb": float("nan")}, ConfigError, "expected memory_mb above 0, .* got nan"),
        (LENGTHS, {"family": "t5"}, ConfigError, "got family"),
        (LENGTHS, {"layers_per_stage": "4,4"}, ConfigError, "Expected `array | null`, got `str`"),
        (LENGTHS, {"expert_layers": 3}, ConfigError, "Expected `array`, got `int`"),
        (LENGTHS, {"recompute": ("some",)}, ConfigError, "Invalid enum value 'some'"),
        (None, {}, ConfigError, "expected the lengths of samples, got None"),
        (LENGTHS, {"memory_mb": None}, ConfigError, "expected memory_mb above 0, .* got None"),
        (LENGTHS, {"layers": None}, ConfigError, "Expected `int`, got `null`"),
        (LENGTHS, {"layers": 10**9}, ConfigError, "expected layers of at most 100000, got 1000000000"),
        (LENGTHS, {"pipeline_parallel": 10**6}, ConfigError, "expected pipeline_parallel of at most 100000"),
        ([5, [812, 3]], {}, ConfigError, r"lengths\[1\]: .* an integer from 1 to 1048576, got \[812, 3\]"),
        ([(812, 3)], {}, ConfigError, r"got \(812, 3\)\nhint: .* the cost model describes a gpt model"),
        ([(812,)], {}, ConfigError, r"got \(812,\)"),
        (["a"], {}, ConfigError, "got 'a'"),
        ([3.9, 5], {}, ConfigError, "got 3.9"),
        ([0, 5], {}, ConfigError, "got 0"),
        ([2**31], {}, ConfigError, "got 2147483648"),
    ],
)
def test_what_cannot_be_planned(lengths, changes, error, said) -> None:
    with pytest.raises(error, match=said):
        plan_batch(lengths, costs(), equal_counts=True, **LAYOUT | changes)


@pytest.mark.parametrize("sample", [5, (5,), (5, 2), (0, 5), (5, 3.0), "ab"])
def test_a_sample_of_an_encoder_and_decoder_is_a_pair(sample) -> None:
    with pytest.raises(ConfigError, match=r"lengths\[1\]: .* a pair: of its input, .*, and of its target, from 3"):
        plan_batch([(5, 5), sample], costs(ModelFamily.T5), **LAYOUT | {"layers": (4, 4)})
