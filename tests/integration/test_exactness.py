"""Any plan and layout gives the loss and gradients of the same samples one by one, unpadded, in one process."""

import functools

import pytest
import torch

from tests.helpers.processes import run_ranks
from tests.integration.models.compare import assert_close

ALL = list(range(12))


def call(rank: int, world_size: int, function: str, **arguments: object) -> object:
    """Run a function of `tiny`, whose import of Megatron only the ranks should see."""
    from tests.integration import tiny

    return getattr(tiny, function)(rank, world_size, **arguments)


@functools.cache
def reference(family: str) -> dict:
    return run_ranks(call, 1, {"function": "train_one_by_one", "family": family, "samples": ALL})[0]


def merged(results: list[dict]) -> dict[str, torch.Tensor]:
    """Gradients of the whole model; ranks that hold the same weight must have the same gradient."""
    gradients: dict[str, torch.Tensor] = {}
    for result in results:
        for name, gradient in result["gradients"].items():
            known = gradients.setdefault(name, gradient)
            assert torch.allclose(known, gradient, rtol=1e-5, atol=1e-8), name
    return gradients


SHARES = {
    "one replica": [ALL],
    "two replicas, most samples on one": [[0, 5, 11], [1, 2, 3, 4, 6, 7, 8, 9, 10]],
    "two replicas, one without samples": [ALL, []],
}


CASES = [(name, overlap) for name in SHARES for overlap in (False, True) if name != "one replica" or not overlap]


@pytest.mark.parametrize(("name", "overlap"), CASES, ids=[f"{n}{', overlapped' * overlap}" for n, overlap in CASES])
@pytest.mark.parametrize(("family", "stages"), [("gpt", 1), ("gpt", 2), ("t5", 1), ("t5", 2), ("t5", 4)])
def test_planned_micro_batches_train_as_samples_one_by_one(family, stages, name, overlap):
    shares = SHARES[name]
    arguments = {"function": "train_planned", "family": family, "stages": stages, "shares": shares}
    results = run_ranks(call, stages * len(shares), arguments | {"overlap_grad_reduce": overlap})
    expected = reference(family)
    last = results[-1]
    assert last["tokens"] == expected["tokens"]
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert_close(merged(results), expected["gradients"], 1e-4)
    shapes = [tuple(shape) for shape in results[0]["shapes"]] or [tuple(shape) for shape in results[1]["shapes"]]
    assert len(shares) > 1 or len(set(shapes)) > 1, "micro-batches of varying shape"


@pytest.mark.parametrize("stages", [1, 2])
def test_a_gpt_in_one_shape_trains_as_under_megatrons_own_schedule(stages):
    results = run_ranks(call, stages, {"function": "train_as_megatron", "stages": stages})
    assert results[-1]["loss"] == pytest.approx(results[-1]["their_loss"], rel=1e-5)
    theirs = [{"gradients": result["their_gradients"]} for result in results]
    assert_close(merged(results), merged(theirs), 1e-5)


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize(("family", "stages"), [("gpt", 2), ("t5", 2), ("t5", 4)])
def test_tied_embeddings_stay_equal_and_count_once_in_the_gradient_norm(family, stages, name):
    shares = SHARES[name]
    arguments = {"function": "train_five_steps", "family": family, "stages": stages, "shares": shares}
    results = run_ranks(call, stages * len(shares), arguments)
    expected = sum(gradient.double().square().sum() for gradient in reference(family)["gradients"].values()).sqrt()
    word = "embedding.word_embeddings.weight"
    holders = [result["weights"] for result in results if word in result["weights"]]
    assert len(holders) == len(shares) * (3 if stages == 4 else 2)
    for result in results:
        assert result["norm"] == pytest.approx(expected.item(), rel=1e-4)
        for weights in holders:
            for weight, value in result["weights"].items():
                assert weight not in weights or torch.equal(weights[weight], value), weight
