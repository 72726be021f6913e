"""Overflow in half precision: all ranks skip the step, and the loss scale falls."""

import pytest

from tests.helpers.layouts.layout import Layout, on_ranks


@pytest.mark.parametrize("divided", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_overflow_on_any_rank_skips_the_step_on_all(divided):
    results = on_ranks("probes.overflow", Layout(tensor=2, stages=2, dtype="fp16", loss_scale=64.0, divided=divided))
    for result in results:
        assert [found["scale"] for found in result] == [32.0, 16.0, 8.0, 4.0]
        for found in result:
            assert not found["updated"] and found["unchanged"]
            assert not found["overflowed_next"] and found["changed_next"]


def test_the_loss_scale_falls_until_the_gradients_are_finite():
    layout = Layout(family="t5", stages=2, replicas=2, dtype="fp16", loss_scale=2.0**18)
    results = on_ranks("trainer.train", layout, steps=14)
    for result in results:
        assert result["overflowed"] == results[0]["overflowed"]
        assert result["losses"] == results[0]["losses"]
    overflowed, losses = results[0]["overflowed"], results[0]["losses"]
    assert overflowed[0] and not overflowed[-1]
    skipped = overflowed.index(False)
    assert len(set(losses[: skipped + 1])) == 1, "weights stay as they are"
    assert losses[-1] < losses[0]
