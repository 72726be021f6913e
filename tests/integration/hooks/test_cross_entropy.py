"""Cross entropy in chunks against PyTorch's, whole and over a sharded vocabulary."""

import pytest

from tests.helpers.processes import run_ranks

ROWS, COLUMNS, VOCABULARY = 5, 3, 24


def losses(*, rank: int, world_size: int, dtype: str, elements: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from megatron_dynapipe.integration.hooks import cross_entropy

    dist.init_process_group("gloo", init_method="env://")
    cross_entropy.CPU_ELEMENTS = elements
    draw = torch.Generator().manual_seed(5)
    whole = (30 * torch.randn(ROWS, COLUMNS, VOCABULARY, generator=draw)).to(getattr(torch, dtype)).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS, COLUMNS), generator=draw)
    outer = torch.rand(ROWS, COLUMNS, generator=draw)
    expected = torch.nn.functional.cross_entropy(whole.double().movedim(-1, 1), labels, reduction="none")
    expected.backward(outer.double())
    share = VOCABULARY // world_size
    mine = slice(rank * share, (rank + 1) * share)
    logits = whole.detach()[..., mine].clone().requires_grad_()
    kept = logits.detach().clone()
    found = cross_entropy.chunked_cross_entropy(logits, labels, dist.group.WORLD)
    found.backward(outer)
    alone = cross_entropy.chunked_cross_entropy(kept, labels, dist.group.WORLD)
    dist.destroy_process_group()
    return {
        "loss": (found.double() - expected).abs().max().item(),
        "without gradient": (alone.double() - expected).abs().max().item(),
        "gradient": (logits.grad.double() - whole.grad[..., mine].double()).abs().max().item(),
        "changed": (logits - kept).abs().max().item(),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 8e-3)])
@pytest.mark.parametrize("elements", [1, 2 * VOCABULARY, 2**18], ids=["row by row", "in chunks", "at once"])
def test_losses_and_gradients_are_pytorchs(ranks: int, dtype: str, bound: float, elements: int) -> None:
    for found in run_ranks(losses, ranks, {"dtype": dtype, "elements": elements}):
        assert found["loss"] < 2e-5 and found["without gradient"] < 2e-5
        assert found["gradient"] < bound
        assert found["changed"] == 0, "the logits stay as they are"
