"""Permutations place by place: each place once, others by other keys."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.sampling.batches import key_of, permuted


@given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
def test_every_place_once(size: int, seed: int) -> None:
    found = permuted(np.arange(size), size, key_of(seed))
    assert sorted(found.tolist()) == list(range(size))


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


def test_golden() -> None:
    """Frozen: changing it would give resumed runs other samples."""
    assert permuted(np.arange(7), 7, key_of(3, 1)).tolist() == GOLDEN


GOLDEN = [4, 3, 0, 5, 2, 1, 6]
