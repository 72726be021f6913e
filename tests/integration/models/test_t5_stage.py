from pathlib import Path

import pytest
import torch

from tests.helpers.layouts.compare import assert_close
from tests.helpers.processes import run_ranks

SPLITS = {
    "2 + 2": (2, 2, [[2, 2], [1, 1, 1, 1], [1, 2, 1], [3, 1]]),
    "odd depths, encoder deeper": (3, 2, [[2, 3], [4, 1], [1, 1, 1, 1, 1], [2, 2, 1]]),
    "both stacks start together": (1, 3, [[2, 2], [3, 1], [2, 1, 1]]),
}
MODELS = {
    "learned positions": ("learned_absolute", True),
    "learned positions, untied": ("learned_absolute", False),
    "rotary": ("rope", True),
    "relative, untied": ("relative", False),
    "relative": ("relative", True),
}


def call(rank: int, world_size: int, function: str, **arguments):
    """Run a function of `t5_ranks`, whose import of Megatron only the ranks should see."""
    from tests.integration.models import t5_ranks

    return getattr(t5_ranks, function)(rank, world_size, **arguments)


DAILY = ("learned positions", "relative, untied")
SLOW = [model for model in MODELS if model not in DAILY]


@pytest.mark.parametrize("models", [DAILY, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["daily", "others"])
def test_stages_chained_in_one_process_have_the_loss_and_gradients_of_one_stage(models):
    names = ("encoder", "decoder", "splits", "positions", "tied")
    cases = [dict(zip(names, (*SPLITS[split], *MODELS[model]), strict=True)) for split in SPLITS for model in models]
    run_ranks(call, 1, {"function": "check_all", "check": "check_chains", "cases": cases})


WITH_ATTENTION = [
    (*model, attention) for model in MODELS.values() for attention in ("megatron", "sdpa") if model[0] != "relative"
] + [("relative", True, "sdpa"), ("relative", False, "sdpa")]


def test_one_stage_is_megatrons_own_t5():
    names = ("positions", "tied", "attention")
    cases = [{"encoder": 2, "decoder": 3} | dict(zip(names, case, strict=True)) for case in WITH_ATTENTION]
    run_ranks(call, 1, {"function": "check_all", "check": "check_against_megatrons", "cases": cases})


def trained(split: list[int], tensor_parallel: int = 1, chunks: int = 1, **case: object) -> dict[str, torch.Tensor]:
    """Gradients of one iteration of a T5 of 2 + 2 layers, parts put together.

    Copies of a shared weight must start equal and have the same, summed gradient.
    """
    arguments = {"function": "train_gradients", "split": split, "chunks": chunks, "tensor_parallel": tensor_parallel}
    results = run_ranks(call, len(split) // chunks * tensor_parallel, arguments | case)
    merged: dict[str, dict[str, torch.Tensor]] = {"start": {}, "gradients": {}}
    for rank in results:
        for chunk, tensors in rank.items():
            for name, (part, shape, offset) in tensors.items():
                whole = merged[chunk.split()[0]].setdefault(name, torch.full(shape, torch.nan))
                ends = (slice(start, start + length) for start, length in zip(offset, part.shape, strict=True))
                place = whole[tuple(ends)]
                assert place.isnan().all() or torch.allclose(place, part, rtol=1e-5, atol=1e-8), (chunk, name)
                place.copy_(part)
    assert not any(gradient.isnan().any() for gradient in merged["gradients"].values())
    return merged["gradients"]


@pytest.fixture(scope="module")
def of_two_stages(tmp_path_factory):
    """For a model: a checkpoint saved by two stages, and their gradients; made when first asked for."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def of(model: str, **changes: object) -> tuple[Path, dict[str, torch.Tensor]]:
        key = f"{model} {changes}"
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            positions, tied = MODELS[model]
            case = {"positions": positions, "tied": tied, "changes": changes}
            made[key] = folder, trained([2, 2], save=str(folder), **case)
        return made[key]

    return of


LAYOUTS = {
    # layers per virtual stage, tensor-parallel ranks, chunks per rank
    "one stage": ([4], 1, 1),
    "boundary inside a stage": ([1, 3], 1, 1),
    "four stages": ([1, 1, 1, 1], 1, 1),
    "two stages of two chunks": ([1, 1, 1, 1], 1, 2),
    "three stages on two tensor ranks each": ([1, 2, 1], 2, 1),
    "one stage on two tensor ranks": ([4], 2, 1),
    "two stages on two tensor ranks each": ([3, 1], 2, 1),
}
FOR_ALL_MODELS = ("four stages", "two stages of two chunks", "two stages on two tensor ranks each")
EVERY_DAY = {
    ("boundary inside a stage", "learned positions"),
    ("three stages on two tensor ranks each", "learned positions"),
    ("two stages of two chunks", "relative, untied"),
    ("four stages", "relative"),
    ("two stages on two tensor ranks each", "rotary"),
}
CASES = [
    pytest.param(layout, model, marks=[] if (layout, model) in EVERY_DAY else pytest.mark.slow)
    for model in MODELS
    for layout in LAYOUTS
    if model == "learned positions" or layout in FOR_ALL_MODELS
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_a_checkpoint_loads_in_every_layout_and_gives_the_same_gradients(of_two_stages, layout, model):
    folder, expected = of_two_stages(model)
    split, tensor_parallel, chunks = LAYOUTS[layout]
    positions, tied = MODELS[model]
    case = {"load": str(folder), "positions": positions, "tied": tied}
    assert_close(trained(split, tensor_parallel, chunks, **case), expected, 1e-5)


SEQUENCE_PARALLEL = [
    pytest.param("learned positions", "LayerNorm", [1, 3], id="learned positions", marks=pytest.mark.slow),
    pytest.param("relative", "LayerNorm", [3, 1], id="relative, boundary inside a stage"),
    pytest.param("rotary", "RMSNorm", [2, 2], id="rotary, RMSNorm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "norm", "split"), SEQUENCE_PARALLEL)
def test_sequence_parallelism_gives_the_same_gradients(of_two_stages, model, norm, split):
    folder, expected = of_two_stages(model, normalization=norm)
    positions, tied = MODELS[model]
    changes = {"sequence_parallel": True, "normalization": norm}
    case = {"load": str(folder), "positions": positions, "tied": tied, "changes": changes}
    assert_close(trained(split, 2, **case), expected, 1e-5)


RECOMPUTED = {
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("changes", RECOMPUTED.values(), ids=RECOMPUTED.keys())
@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tables_of_relative_positions_get_their_gradients_under_recomputation(of_two_stages, changes, tensor_parallel):
    folder, expected = of_two_stages("relative")
    case = {"load": str(folder), "positions": "relative", "changes": changes}
    assert_close(trained([2, 2], tensor_parallel, **case), expected, 1e-5)


def test_process_groups_made_for_another_model_are_refused():
    for message in run_ranks(call, 2, {"function": "build_without_embedding_ranks"}):  # Megatron's default
        assert "expected embedding groups of one rank, got one of 2: Megatron would reduce" in message
        assert "give pretrain the split's embedding_ranks" in message
