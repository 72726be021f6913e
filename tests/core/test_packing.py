import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.plan import RowOffsets, row_offsets
from megatron_dynapipe.core.units import ModelFamily, Shape
from tests.helpers.lists import packed


@pytest.mark.parametrize(
    ("family", "inputs", "targets", "offsets", "shape"),
    [
        (ModelFamily.GPT, (4, 1, 6), (0, 0, 0), RowOffsets((0, 3, 4, 9), (0, 0, 0, 0)), Shape(1, 16)),
        (ModelFamily.GPT, (9,), (0,), RowOffsets((0, 8), (0, 0)), Shape(1, 8)),
        (ModelFamily.T5, (3, 5), (1, 4), RowOffsets((0, 3, 8), (0, 3, 9)), Shape(1, 8, 16)),
    ],
)
def test_offsets_follow_from_lengths(family, inputs, targets, offsets, shape):
    batch = packed(family, inputs, targets)
    assert (row_offsets(family, batch), batch.shape) == (offsets, shape)


@given(st.sampled_from(list(ModelFamily)), st.lists(st.tuples(st.integers(1, 99), st.integers(1, 30)), min_size=1))
def test_a_row_holds_its_samples_and_less_than_eight_positions_more(family, lengths):
    inputs, targets = zip(*lengths, strict=True)
    targets = targets if family is ModelFamily.T5 else (0,) * len(inputs)
    batch = packed(family, inputs, targets)
    ends = (offsets[-1] for offsets in row_offsets(family, batch))
    assert all(0 <= length - end < 8 for length, end in zip(batch.shape[1:], ends, strict=True))
