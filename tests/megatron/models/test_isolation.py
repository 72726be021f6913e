"""No attention across the samples of a packed row: one that changes moves its own logits, and no other's."""

import pytest

from tests.helpers.layouts.layout import Layout, on_ranks

MODELS = {
    "gpt": Layout(family="gpt"),
    "gpt, rotary": Layout(family="gpt", positions="rope"),
    "t5": Layout(family="t5"),
    "t5, rotary": Layout(family="t5", positions="rope"),
    "t5, relative": Layout(family="t5", positions="relative"),
}


@pytest.mark.parametrize("layout", MODELS.values(), ids=MODELS.keys())
def test_a_sample_that_changes_moves_its_own_logits_alone(layout):
    for moved in on_ranks("isolation.change", layout)[0]:
        assert moved["own"] > 1e-2
        assert moved["others"] == 0.0
        assert moved["alone"] < 1e-4
