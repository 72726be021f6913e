"""A patched checkout's own step function and attention, on all kinds of rows, against samples one by one."""

import pytest

from tests.helpers.layouts.compare import assert_close, gradients_of
from tests.helpers.layouts.layout import on_ranks, reference, table

LAYOUTS = (
    "gpt 1x2x1, Megatron's attention, recompute mixed, rows mixed",
    "gpt 1x2x1, two chunks, rotary positions, Megatron's attention, packed *",
    "gpt 2x1x1, losses of targets, Megatron's attention, rows mixed *",
)


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_rows_reach_a_model_that_is_called_without_them(layout):
    results, expected = on_ranks("injection.train", layout), reference(layout.model)
    assert results[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert_close(gradients_of(results), gradients_of([expected]), 1e-4)
