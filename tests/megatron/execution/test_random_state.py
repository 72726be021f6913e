"""Dropout draws the same masks however an iteration is run: again, recomputed, over other stages."""

from dataclasses import replace

import pytest

from tests.helpers.layouts.compare import gradients_of, relative_error
from tests.helpers.layouts.layout import Layout, on_ranks, table

DROPOUT = (
    "gpt 1x1x1, dropout",
    "gpt 1x2x1, two chunks, dropout *",
    "gpt 2x2x1, dropout",
    "gpt 1x2x1, losses of targets, layers 3.5+0.5, packed, dropout *",
    "gpt 2x2x1, losses of targets, sequence parallel, dropout",
    "t5 1x1x1, dropout",
    "t5 1x1x1, packed, dropout *",
    "t5 1x2x2, dropout",
)


@pytest.mark.parametrize("layout", table(DROPOUT))
def test_an_iteration_run_again_or_recomputed_draws_the_same_masks_and_the_next_one_others(layout):
    modes = [["none"], ["none"], ["full"], ["selective"], ["none", "full"]]
    results = on_ranks("probes.replay", layout, modes=modes)
    first, *again, following = ([result[run] for result in results] for run in range(len(modes) + 1))
    for run in again:
        assert run[-1]["loss"] == first[-1]["loss"]
        for name, gradient in gradients_of(run).items():
            assert relative_error(gradient, gradients_of(first)[name]) < 1e-6, name
    assert following[-1]["loss"] != pytest.approx(first[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("split", [(1, 1, 1, 1), (2.5, 1.5)])
def test_masks_do_not_depend_on_how_layers_lie_over_stages(split):
    # The same micro-batches: as many fit the memory, and splits differ in how they fill the pipeline alone.
    alone = Layout(dropout=0.1, samples=(4,), layer_overhead_us=1e6)
    losses = [
        on_ranks("probes.replay", layout, modes=[["none"]])[-1][0]["loss"]
        for layout in (alone, replace(alone, stages=len(split), split=split))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
