"""The same samples give the same loss and gradients under any plan and layout as one by one, unpadded, in one process."""

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
