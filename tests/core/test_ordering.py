"""Orders of samples: every sample once, neighbours alike, the same every time."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.partition import BAND_RATIO, by_bands, by_length, candidate_orders
from tests.helpers.examples import examples


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("order", "inputs", "targets", "expected"),
    [
        pytest.param(by_length, [8], [0], [0], id="one sample"),
        pytest.param(by_length, [8, 24, 16], [0, 0, 0], [1, 2, 0], id="longest first"),
        pytest.param(by_length, [8, 8, 16, 16], [0, 0, 0, 0], [2, 3, 0, 1], id="of equal samples, the first first"),
        pytest.param(by_length, [8, 8, 8], [16, 24, 16], [1, 0, 2], id="of equal inputs, the longest target first"),
        pytest.param(by_bands, [8], [8], [0], id="one sample by bands"),
        pytest.param(by_bands, [8, 24, 16], [8, 8, 8], [1, 2, 0], id="one band is by length"),
        pytest.param(by_bands, [8, 24, 16], [40, 8, 16], [1, 2, 0], id="as far as the ratio"),
        pytest.param(by_bands, [8, 24, 16], [48, 8, 8], [0, 2, 1], id="beyond it, a band of its own, turned"),
        pytest.param(
            by_bands, [8, 64, 64, 8, 8, 64], [480, 480, 80, 80, 8, 8], [1, 0, 3, 2, 5, 4], id="down, up, down"
        ),
        pytest.param(by_bands, [8, 8, 8], [16, 24, 16], [1, 0, 2], id="of equal inputs in a band, the longest target"),
    ],
)
def test_orders(order, inputs, targets, expected) -> None:
    assert order(ints(inputs), ints(targets)).tolist() == expected


def test_decoder_only_samples_have_one_order() -> None:
    inputs, none = ints([8, 24, 16]), ints([0, 0, 0])
    assert [order.tolist() for order in candidate_orders(inputs, none)] == [[1, 2, 0]]
    assert len(candidate_orders(inputs, ints([8, 8, 8]))) == 2


samples = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 300)), min_size=1, max_size=40)


@settings(max_examples=examples(100))
@given(samples, st.randoms(use_true_random=False))
def test_every_sample_once_in_whatever_order_they_are_given(lengths: list[tuple[int, int]], random: Random) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)

    def ordered(given: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        orders = candidate_orders(ints([n for n, _ in given]), ints([m for _, m in given]))
        assert all(order.dtype == np.int64 and sorted(order.tolist()) == list(range(len(given))) for order in orders)
        return [[given[row] for row in order] for order in orders]

    assert ordered(shuffled) == ordered(lengths)


@settings(max_examples=examples(100))
@given(samples)
def test_bands_hold_similar_targets(lengths: list[tuple[int, int]]) -> None:
    """Bands follow one another by target: a later sample is longer than an earlier one by the ratio at most."""
    inputs, targets = ints([n for n, _ in lengths]), ints([m for _, m in lengths])
    ordered = targets[by_bands(inputs, targets)]
    least_so_far = np.minimum.accumulate(ordered)
    assert (ordered <= BAND_RATIO * least_so_far).all()
