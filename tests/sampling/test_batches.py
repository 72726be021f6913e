"""Boundaries of batches against rules simple enough to be right, and orders of tasks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.sampling import batches as batches_module
from megatron_dynapipe.sampling.batches import Batches, LastBatch, TaskDraws, TaskRows, draws_of_rates, key_of, permuted


def by_hand(
    lengths: list[int], epochs: int, *, samples: int | None, tokens: int | None, last: LastBatch
) -> list[list[int]]:
    """Batches of places, sample by sample."""
    batches: list[list[int]] = []
    batch: list[int] = []
    size = len(lengths)
    for place in range(size * epochs):
        if place % size == 0 and last is not LastBatch.CONTINUE and batch:
            batches.append(batch)
            batch = []
        total = sum(lengths[each % size] for each in batch)
        full = len(batch) == samples if tokens is None else total + lengths[place % size] > tokens
        if batch and full:
            batches.append(batch)
            batch = []
        batch.append(place)
    batches.append(batch)
    if last is LastBatch.DROP:
        ends = {size * epoch - 1 for epoch in range(1, epochs + 1)}
        short = [each for each in batches if each[-1] in ends and len(each) != samples]
        batches = [each for each in batches if each not in short or (tokens is not None and each[0] % size == 0)]
    return batches


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=25),
    epochs=st.integers(1, 4),
    samples=st.integers(1, 12),
    tokens=st.none() | st.integers(1, 60),
    last=st.sampled_from(list(LastBatch)),
    at_once=st.integers(1, 40),
)
def test_boundaries(lengths, epochs, samples, tokens, last, at_once):
    batches_module._AT_ONCE = at_once
    size = len(lengths)
    of = np.array(lengths, np.int64)
    given_size = {"samples": samples} if tokens is None else {"tokens": tokens}
    if tokens is None and last is LastBatch.DROP and samples > size:
        with pytest.raises(ConfigError, match="expected an epoch of at least one batch"):
            Batches(size, samples=samples, last=last)
        return
    planned = Batches(
        size, **given_size, lengths=lambda first, stop: of[np.arange(first, stop) % size], last=last, epochs=epochs
    )  # type: ignore[arg-type]
    expected = by_hand(lengths, epochs, samples=samples if tokens is None else None, tokens=tokens, last=last)
    assert planned.count == len(expected)
    assert [list(range(*planned.bounds(at))) for at in range(len(expected))] == expected
    with pytest.raises(ConfigError, match="after which the epochs end"):
        planned.bounds(len(expected))
    batches_module._AT_ONCE = 2**16


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=25),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 60)),
    is_by_tokens=st.tuples(st.booleans(), st.booleans()),
    last=st.sampled_from([LastBatch.CONTINUE, LastBatch.KEEP]),
    at=st.integers(0, 30),
)
def test_batches_of_another_size_go_on_where_others_ended(lengths, sizes, is_by_tokens, last, at):
    size, epochs = len(lengths), 3
    of = np.array(lengths, np.int64)

    def batches(which: int, **begin: int) -> Batches:
        unit = "tokens" if is_by_tokens[which] else "samples"
        return Batches(
            size,
            **{unit: sizes[which]},
            lengths=lambda first, stop: of[np.arange(first, stop) % size],
            last=last,
            epochs=epochs,
            **begin,
        )  # type: ignore[arg-type]

    before = batches(0)
    at = min(at, before.count or 0)
    place = before.bounds(at - 1)[1] if at else 0
    after = batches(1, first_iteration=at, first_place=place)
    bounds = [before.bounds(number) for number in range(at)]
    bounds += [after.bounds(number) for number in range(at, after.count or 0)]
    assert [place for first, stop in bounds for place in range(first, stop)] == list(range(size * epochs))
    same = batches(0, first_iteration=at, first_place=place)
    assert same.count == before.count
    assert all(same.bounds(number) == before.bounds(number) for number in range(at, before.count or 0))
    with pytest.raises(ConfigError, match=f"of at least {at}, got {at - 1}"):
        after.bounds(at - 1)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    rates=st.lists(st.floats(0.01, 10), min_size=6, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_every_row_of_a_task_before_one_again(sizes: list[int], rates: list[float], seed: int) -> None:
    draws = draws_of_rates(sizes, rates[: len(sizes)])
    tasks = TaskRows.of(np.repeat(np.arange(len(sizes)), sizes))
    order = TaskDraws(seed, tasks, draws)
    epochs = 5
    rows = order.rows(0, epochs * order.per_epoch)
    ends = np.cumsum(sizes)
    for epoch in range(epochs):
        part = rows[epoch * order.per_epoch : (epoch + 1) * order.per_epoch]
        assert np.bincount(np.searchsorted(ends, part, side="right"), minlength=len(sizes)).tolist() == draws
    for task, size in enumerate(sizes):
        times = Counter(rows[(rows >= ends[task] - size) & (rows < ends[task])].tolist())
        drawn = epochs * draws[task]
        assert set(times.values()) <= {drawn // size, -(-drawn // size)}
    cut = len(rows) // 3
    assert np.concatenate([order.rows(0, cut), order.rows(cut, len(rows))]).tolist() == rows.tolist()


def test_without_an_end() -> None:
    assert Batches(10, samples=4).bounds(10**12) == (4 * 10**12, 4 * 10**12 + 4)
    assert Batches(10, samples=4).count is None
    assert Batches(10, samples=4, last=LastBatch.KEEP).bounds(5) == (18, 20)
    for sizes in ({}, {"samples": 2, "tokens": 2}):
        with pytest.raises(ConfigError, match="expected batches of samples or of tokens"):
            Batches(10, **sizes)


def test_sizes_and_keys_may_differ_by_place() -> None:
    sizes = np.array([5, 9, 5, 1000, 1])
    places = np.array([4, 8, 4, 999, 0])
    keys = key_of(7, np.array([0, 1, 0, 2, 3]))
    alone = [
        int(permuted(np.array([place]), size, key)[0]) for place, size, key in zip(places, sizes, keys, strict=True)
    ]
    assert permuted(places, sizes, keys).tolist() == alone


def test_it_looks_random() -> None:
    """Places of neighbours are far apart, and another key gives another order."""
    size = 10_000
    one, two = (permuted(np.arange(size), size, key_of(seed)) for seed in (1, 2))
    assert abs(np.corrcoef(np.arange(size), one)[0, 1]) < 0.05
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.05
    assert 0.25 < np.abs(np.diff(one)).mean() / size < 0.42  # a third for a random order
