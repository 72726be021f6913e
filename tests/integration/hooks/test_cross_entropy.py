"""Cross entropy in chunks against PyTorch's, whole and over a sharded vocabulary."""

from collections.abc import Callable

import pytest

from tests.helpers.processes import run_ranks

ROWS, COLUMNS, VOCABULARY = 5, 3, 24


BOUNDS = {"float32": 1e-5, "bfloat16": 8e-3}
ELEMENTS = {"row by row": 1, "in chunks": 2 * VOCABULARY, "at once": 2**18}


def errors_of_all(*, rank: int, world_size: int) -> dict[str, dict[str, float]]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://")
    return {
        f"{dtype}, {chunks}": errors(rank, world_size, dtype, elements)
        for dtype in BOUNDS
        for chunks, elements in ELEMENTS.items()
    }


def errors_on_gpu(*, rank: int, world_size: int) -> dict[str, dict[str, float]]:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method="env://")
    return {f"{dtype}, on a GPU": errors(rank, world_size, dtype, 2 * VOCABULARY, "cuda") for dtype in BOUNDS}


def errors(rank: int, world_size: int, dtype: str, elements: int, device: str = "cpu") -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from megatron_dynapipe.integration.hooks import cross_entropy

    cross_entropy.CPU_ELEMENTS = elements
    draw = torch.Generator().manual_seed(5)
    whole = (30 * torch.randn(ROWS, COLUMNS, VOCABULARY, generator=draw)).to(device, getattr(torch, dtype))
    labels = torch.randint(VOCABULARY, (ROWS, COLUMNS), generator=draw).to(device)
    outer = torch.rand(ROWS, COLUMNS, generator=draw).to(device)
    whole.requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole.double().movedim(-1, 1), labels, reduction="none")
    expected.backward(outer.double())
    share = VOCABULARY // world_size
    mine = slice(rank * share, (rank + 1) * share)
    logits = whole.detach()[..., mine].clone().requires_grad_()
    kept = logits.detach().clone()
    found = cross_entropy.chunked_cross_entropy(logits, labels, dist.group.WORLD)
    found.backward(outer)
    alone = cross_entropy.chunked_cross_entropy(kept, labels, dist.group.WORLD)
    return {
        "loss": (found.double() - expected).abs().max().item(),
        "without gradient": (alone.double() - expected).abs().max().item(),
        "gradient": (logits.grad.double() - whole.grad[..., mine].double()).abs().max().item(),
        "changed": (logits - kept).abs().max().item(),
    }


@pytest.mark.parametrize(
    ("function", "ranks"),
    [*((errors_of_all, ranks) for ranks in (1, 2, 3)), pytest.param(errors_on_gpu, 1, marks=pytest.mark.gpu)],
)
def test_losses_and_gradients_are_pytorchs(function: Callable[..., object], ranks: int) -> None:
    for of_rank in run_ranks(function, ranks):
        for case, found in of_rank.items():
            assert found["loss"] < 2e-5 and found["without gradient"] < 2e-5, case
            assert found["gradient"] < BOUNDS[case.partition(",")[0]], case
            assert found["changed"] == 0, f"{case}: the logits stay as they are"
