from pathlib import Path

import pytest
import torch

from tests.helpers.processes import run_ranks
from tests.integration.models.compare import assert_close

SPLITS = {
    "2 + 2": (2, 2, [[2, 2], [1, 1, 1, 1], [1, 2, 1], [3, 1]]),
    "odd depths, encoder deeper": (3, 2, [[2, 3], [4, 1], [1, 1, 1, 1, 1], [2, 2, 1]]),
    "both stacks start together": (1, 3, [[2, 2], [3, 1], [2, 1, 1]]),
}


def call(rank: int, world_size: int, function: str, **arguments):
    """Run a function of `t5_ranks`, whose import of Megatron only the ranks should see."""
    from tests.integration.models import t5_ranks

    return getattr(t5_ranks, function)(rank, world_size, **arguments)


@pytest.mark.parametrize(("encoder", "decoder", "splits"), SPLITS.values(), ids=SPLITS.keys())
def test_stages_chained_in_one_process_have_the_loss_and_gradients_of_one_stage(encoder, decoder, splits):
    run_ranks(call, 1, {"function": "check_chains", "encoder": encoder, "decoder": decoder, "splits": splits})


def test_one_stage_is_megatrons_own_t5():
    run_ranks(call, 1, {"function": "check_against_megatrons", "encoder": 2, "decoder": 3})


@pytest.fixture(scope="module")
def of_two_stages(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint saved by two stages, and their gradients, embeddings merged."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, gradients([2, 2], save=str(folder))


def gradients(split: list[int], tensor_parallel: int = 1, **files: str) -> dict[str, torch.Tensor]:
    """Of one iteration over a T5 of 2 + 2 layers; copies of a tied weight must have the same, summed one."""
    arguments = {"function": "train_gradients", "encoder": 2, "decoder": 2, "split": split, **files}
    arguments["tensor_parallel"] = tensor_parallel
    merged: dict[str, torch.Tensor] = {}
    for rank in run_ranks(call, len(split) * tensor_parallel, arguments):
        for name, (part, shape, offset) in rank.items():
            whole = merged.setdefault(name, torch.full(shape, torch.nan))
            place = whole[tuple(slice(start, start + length) for start, length in zip(offset, part.shape, strict=True))]
            assert place.isnan().all() or torch.allclose(place, part, rtol=1e-5, atol=1e-9), name
            place.copy_(part)
    assert not any(gradient.isnan().any() for gradient in merged.values())
    return merged


LAYOUTS = {
    "one stage": ([4], 1),
    "boundary inside a stage": ([1, 3], 1),
    "four stages": ([1, 1, 1, 1], 1),
    "one stage on two tensor ranks": ([4], 2),
    "two stages on two tensor ranks each": ([3, 1], 2),
}


@pytest.mark.parametrize(("split", "tensor_parallel"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_checkpoint_loads_in_every_layout_and_gives_the_same_gradients(of_two_stages, split, tensor_parallel):
    folder, expected = of_two_stages
    assert_close(gradients(split, tensor_parallel, load=str(folder)), expected, 1e-5)


def test_process_groups_made_for_another_model_are_refused():
    messages = run_ranks(call, 2, {"function": "build_without_embedding_ranks"})
    for ranks, message in zip((1, 0), messages, strict=True):  # Megatron's default: positions on the first stage only
        assert f"expected an embedding group over the ranks of stages [0, 1], got one of {ranks} ranks" in message
        assert "give pretrain the split's embedding_ranks" in message
