"""The sampler against tables small enough to check by eye, and its promises by Hypothesis."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling import GlobalBatch, LengthTable, LongSamples, Sampler, SamplerSettings, SpanTable


def table(pairs: list[tuple[int, int]]) -> LengthTable:
    """Lengths of samples given as (input, target) pairs."""
    inputs, targets = zip(*pairs, strict=True)
    return LengthTable(input=np.array(inputs, np.int32), target=np.array(targets, np.int32))


def settings(**changes: object) -> SamplerSettings:
    """Settings of a small T5 run, with changes."""
    values: dict[str, object] = {
        "family": ModelFamily.T5,
        "seed": 1,
        "samples_per_iteration": 2,
        "max_input_length": 10,
        "max_target_length": 4,
    }
    return SamplerSettings(**(values | changes))  # type: ignore[arg-type]


PAIRS = [(3, 1), (10, 4), (11, 1), (2, 5), (12, 6)]


@pytest.mark.parametrize(
    ("family", "policy", "expected"),
    [
        # sample → (input, target) tokens after the policy
        ("t5", "truncate", {0: (3, 1), 1: (10, 4), 2: (10, 1), 3: (2, 4), 4: (10, 4)}),
        ("t5", "skip", {0: (3, 1), 1: (10, 4)}),
        # decoder-only: input and target in one sequence, cut as one
        ("gpt", "truncate", {0: (4, 0), 1: (10, 0), 2: (10, 0), 3: (7, 0), 4: (10, 0)}),
        ("gpt", "skip", {0: (4, 0), 3: (7, 0)}),
    ],
)
def test_long_samples(family: str, policy: str, expected: dict[int, tuple[int, int]]) -> None:
    sampler = Sampler(
        table(PAIRS),
        settings(family=ModelFamily(family), long_samples=LongSamples(policy), samples_per_iteration=len(expected)),
    )
    batch = sampler.batch(0)
    rows = zip(batch.sample_ids, batch.input_lengths, batch.target_lengths, strict=True)
    assert {int(row): (int(inputs), int(targets)) for row, inputs, targets in rows} == expected
    assert batch.sample_ids.dtype == np.int64
    assert batch.input_lengths.dtype == batch.target_lengths.dtype == np.int32


def test_positions_that_count() -> None:
    """Those of targets and of earlier turns that are kept; the first token is no label."""
    spans = SpanTable(np.array([[0, 0, 3], [2, 1, 3], [2, 5, 6]]))
    gpt = {"family": ModelFamily.GPT, "long_samples": LongSamples.TRUNCATE, "samples_per_iteration": 5}
    batch = Sampler(table(PAIRS), settings(**gpt, labels=True), spans=spans).batch(0)
    assert batch.labels is not None and batch.labels.dtype == np.int32
    assert dict(zip(batch.sample_ids.tolist(), batch.labels.tolist(), strict=True)) == {0: 3, 1: 4, 2: 4, 3: 5, 4: 6}
    assert np.concatenate([part.labels for part in batch.parts(10)]).tolist() == batch.labels.tolist()
    assert Sampler(table(PAIRS), settings(**gpt)).batch(0).labels is None


def test_long_samples_are_counted() -> None:
    report = Sampler(table(PAIRS), settings(long_samples=LongSamples.SKIP)).report
    assert (report.samples, report.long_samples) == (5, 3)
    assert str(report) == "3 of 5 samples are longer than the maximum and were skipped: 12 of 17 target tokens are lost"
    assert str(Sampler(table(PAIRS[:2]), settings()).report) == "all 2 samples are within the maximum lengths"
    truncated = Sampler(table(PAIRS), settings(long_samples=LongSamples.TRUNCATE)).report
    assert str(truncated).endswith("and were truncated: 3 of 17 target tokens are lost")
    gpt = settings(family=ModelFamily.GPT, long_samples=LongSamples.TRUNCATE)
    assert str(Sampler(table(PAIRS), gpt).report).endswith("and were truncated: no target token is lost")


def test_golden_order() -> None:
    """The order of a seed is frozen: changing it would give resumed runs other samples."""
    sampler = Sampler(table([(size, 1) for size in range(1, 8)]), settings(samples_per_iteration=7))
    assert [sampler.batch(i).sample_ids.tolist() for i in range(2)] == GOLDEN


GOLDEN = [[0, 3, 1, 4, 2, 6, 5], [2, 4, 3, 5, 1, 6, 0]]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 50)), min_size=1, max_size=60), st.integers(1, 3000))
def test_a_divided_batch_has_the_same_samples_in_order_in_parts_of_about_that_size(pairs, tokens):
    lengths = table(pairs)
    whole = GlobalBatch.of_lengths(lengths.input, lengths.target, iteration=3)
    parts = whole.parts(tokens)
    assert np.concatenate([part.sample_ids for part in parts]).tolist() == list(range(len(pairs)))
    assert sum(part.tokens for part in parts) == whole.tokens
    longest = max(sum(pair) for pair in pairs)
    assert all(len(part) and part.iteration == 3 for part in parts)
    assert max(part.tokens for part in parts) <= 1.5 * max(tokens, longest) + longest


SKIP = {"long_samples": LongSamples.SKIP}
RATES = {"task_rates": (1.0, 2.0)}


@pytest.mark.parametrize(
    ("pairs", "changes", "tasks", "message"),
    [
        (PAIRS, {}, None, "at most 10 input and 4 target tokens, sample 2 has 11 and 1 (3 of 5 samples"),
        (PAIRS, {"family": ModelFamily.GPT}, None, "at most 10 tokens (input and target), sample 1 has 14 (3 of 5 sam"),
        ([(20, 1)], SKIP, None, "expected at least 1 usable sample, got 0 of 1 (1 are too long)"),
        (PAIRS[:2], RATES, None, "expected the samples' tasks for their rates or sides, of 2 tasks, got none"),
        (PAIRS[:2], RATES, np.zeros(1, np.int16), "expected the tasks of 2 samples, got the tasks of 1"),
        ([], {"seed": -1}, None, "expected seed of at least 0, got -1"),
        ([], {"samples_per_iteration": 0}, None, "expected samples_per_iteration of at least 1, got 0"),
        ([], {"max_input_length": 0}, None, "expected max_input_length of at least 1, got 0"),
        ([], {"max_input_length": 1, "family": ModelFamily.GPT}, None, "expected max_input_length of at least 2"),
        ([], {"max_target_length": 0}, None, "expected max_target_length of at least 1, got 0"),
    ],
)
def test_what_cannot_be_sampled(pairs, changes, tasks, message) -> None:
    with pytest.raises((ConfigError, DataError), match=re.escape(message)) as caught:
        Sampler(table(pairs or [(1, 1)]), settings(**changes), tasks)
    assert ("--dynapipe-long-samples truncate" in str(caught.value)) == (pairs is PAIRS)
    with pytest.raises(ConfigError, match="expected an iteration of at least 0, got -1"):
        Sampler(table(PAIRS[:2]), settings()).batch(-1)
