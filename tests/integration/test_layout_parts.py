"""What layouts are made of, one by one: dropout's random state, recomputation, overflow in half precision."""

import pytest

from tests.helpers.processes import run_ranks
from tests.integration.models.compare import relative_error
from tests.integration.test_matrix import call, layout, ranks, whole

DROPOUT = {
    "gpt": layout("gpt", dropout=0.1),
    "gpt, two stages of two chunks": layout("gpt", stages=2, chunks=2, dropout=0.1),
    "gpt, tensor parallel": layout("gpt", tensor=2, stages=2, dropout=0.1),
    "t5": layout("t5", dropout=0.1),
    "t5, two stages, two replicas": layout("t5", stages=2, replicas=2, dropout=0.1),
}


@pytest.mark.parametrize("wanted", DROPOUT.values(), ids=DROPOUT.keys())
def test_an_iteration_run_again_or_recomputed_draws_the_same_masks_and_the_next_one_others(wanted):
    modes = [["none"], ["none"], ["full"], ["selective"], ["none", "full"]]
    results = run_ranks(call, ranks(wanted), {"function": "replay", "layout": wanted, "modes": modes})
    first, *again, following = ([result[run] for result in results] for run in range(len(modes) + 1))
    for run in again:
        assert run[-1]["loss"] == first[-1]["loss"]
        for name, gradient in whole(run).items():
            assert relative_error(gradient, whole(first)[name]) < 1e-6, name
    assert following[-1]["loss"] != pytest.approx(first[-1]["loss"], rel=1e-4)


PIPELINES = [layout("gpt", stages=2, dropout=0.1), layout("gpt", stages=4, dropout=0.1)]


@pytest.mark.parametrize("wanted", PIPELINES, ids=["two stages", "four stages"])
def test_masks_do_not_depend_on_how_layers_lie_over_stages(wanted):
    # The same micro-batches: as many fit the memory, and splits differ in how they fill the pipeline alone.
    arguments = {"function": "replay", "modes": [["none"]]}
    given = {"samples": (4,), "layer_overhead_us": 1e6}
    alone = run_ranks(call, 1, arguments | {"layout": layout("gpt", dropout=0.1) | given})
    staged = run_ranks(call, ranks(wanted), arguments | {"layout": wanted | given})
    assert staged[-1][0]["loss"] == pytest.approx(alone[0][0]["loss"], rel=1e-6)


@pytest.mark.parametrize("poisoned", [0, 1, 2, 3])
def test_an_overflow_on_any_rank_skips_the_step_on_all(poisoned):
    wanted = layout("gpt", tensor=2, stages=2, dtype="fp16", loss_scale=64.0)
    results = run_ranks(call, 4, {"function": "overflow", "layout": wanted, "poisoned": poisoned})
    for result in results:
        assert not result["updated"]
        assert result["unchanged"]
        assert result["scale"] == 32.0
        assert not result["overflowed_next"]
        assert result["changed_next"]


def test_the_loss_scale_falls_until_the_gradients_are_finite():
    wanted = layout("t5", stages=2, replicas=2, dtype="fp16", loss_scale=2.0**18)
    results = run_ranks(call, 4, {"function": "train", "layout": wanted, "steps": 14})
    for result in results:
        assert result["overflowed"] == results[0]["overflowed"]
        assert result["losses"] == results[0]["losses"]
    overflowed, losses = results[0]["overflowed"], results[0]["losses"]
    assert overflowed[0] and not overflowed[-1]
    skipped = overflowed.index(False)
    assert len(set(losses[: skipped + 1])) == 1, "weights stay as they are"
    assert losses[-1] < losses[0]
