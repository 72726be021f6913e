"""Losses of targets besides training: what has no label changes nothing, and evaluations run the same rows."""

import pytest
import torch

from tests.helpers.layouts.compare import gradients_of
from tests.helpers.layouts.layout import on_ranks, reference, table

LAYOUTS = (
    "gpt 1x2x1, losses of targets, layers 3.5+0.5, slices of 16, recompute mixed *",
    "gpt 2x2x1, losses of targets, sequence parallel, rows mixed",
)


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_a_bit_of_a_target_without_a_label_changes_nothing(layout):
    runs = list(zip(*on_ranks("probes.changed_targets", layout), strict=True))
    (before, same, other) = ([{"loss": loss, "gradients": parts} for loss, parts in ranks] for ranks in runs)
    assert [run["loss"] for run in same] == [run["loss"] for run in before]
    expected = gradients_of(before)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients_of(same).items())
    assert other[-1]["loss"] != before[-1]["loss"], "one with a label does"


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_an_evaluation_has_the_loss_of_training(layout):
    expected = reference(layout.model)["loss"]
    for result in on_ranks("probes.evaluate", layout):
        assert result["first"] == result["second"] == pytest.approx(expected, rel=1e-6)
