"""A patched checkout's own step function and attention, on padded and packed rows, against samples one by one."""

import pytest

from tests.helpers.layouts.compare import assert_close, gradients_of
from tests.helpers.layouts.layout import MIXED, Layout, on_ranks, reference, table

LAYOUTS = {
    "mixed, two stages, recompute mixed": Layout(attention="megatron", stages=2, rows="mixed", recompute=MIXED),
    "packed, two chunks, rotary positions *": Layout(
        attention="megatron", stages=2, chunks=2, rows="packed", positions="rope"
    ),
}


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_rows_reach_a_model_that_is_called_without_them(layout):
    results, expected = on_ranks("injection.train", layout), reference(layout.model)
    assert results[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert_close(gradients_of(results), gradients_of([expected]), 1e-4)
