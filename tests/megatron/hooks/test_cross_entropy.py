"""Cross entropy against PyTorch's, whole and over a sharded vocabulary, in chunks and compiled."""

import functools
import json
from collections.abc import Callable

import pytest

from tests.helpers.commands import run_python
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


def errors_of_compiled(backend: str = "aot_eager") -> dict[str, dict[str, float]]:
    """The functions that a GPU compiles, compiled for this CPU, of several numbers of rows; two are enough for all."""
    import torch
    import torch.distributed as dist

    from megatron_dynapipe.megatron.hooks import cross_entropy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.compile = functools.partial(torch.compile, backend=backend)
    compiled = cross_entropy._compiled()
    cross_entropy._passes = lambda rows: (*compiled, len(rows) // 2)
    found = {}
    for turn, columns in enumerate((COLUMNS, 2 * COLUMNS, 4 * COLUMNS)):
        with torch._dynamo.config.patch(error_on_recompile=turn > 1):
            found |= {f"{dtype}, {columns}": errors(0, 1, dtype, 0, columns=columns) for dtype in BOUNDS}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 4, "both, of both types"
    return found


def errors_on_gpu(*, rank: int, world_size: int) -> dict[str, dict[str, float]]:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method="env://")
    return {f"{dtype}, on a GPU": errors(rank, world_size, dtype, 2 * VOCABULARY, "cuda") for dtype in BOUNDS}


def errors(
    rank: int, world_size: int, dtype: str, elements: int, device: str = "cpu", columns: int = COLUMNS
) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from megatron_dynapipe.megatron.hooks import cross_entropy

    cross_entropy.ELEMENTS[device] = elements
    draw = torch.Generator().manual_seed(5)
    whole = (30 * torch.randn(ROWS, columns, VOCABULARY, generator=draw)).to(device, getattr(torch, dtype))
    labels = torch.randint(VOCABULARY, (ROWS, columns), generator=draw).to(device)
    outer = torch.rand(ROWS, columns, generator=draw).to(device)
    if world_size > 1:
        with torch.no_grad():
            whole[0, 0, : VOCABULARY // world_size] = -torch.inf  # the first rank's share of a row
        labels[0, 0] = VOCABULARY - 1
    whole.requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole.double().movedim(-1, 1), labels, reduction="none")
    expected.backward(outer.double())
    share = VOCABULARY // world_size
    mine = slice(rank * share, (rank + 1) * share)
    logits = whole.detach()[..., mine].clone().requires_grad_()
    kept = logits.detach().clone()
    found = cross_entropy.cross_entropy(logits, labels, dist.group.WORLD)
    found.backward(outer)
    alone = cross_entropy.cross_entropy(kept, labels, dist.group.WORLD)
    return {
        "loss": (found.double() - expected).abs().max().item(),
        "without gradient": (alone.double() - expected).abs().max().item(),
        "gradient": (logits.grad.double() - whole.grad[..., mine].double()).abs().max().item(),
        "changed": (logits != kept).sum().item(),
    }


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        *((errors_of_all, ranks) for ranks in (1, 2, 3)),
        pytest.param(errors_on_gpu, 1, marks=pytest.mark.gpu),
    ],
)
def test_losses_and_gradients_are_pytorchs(function: Callable[..., object], ranks: int) -> None:
    for of_rank in run_ranks(function, ranks):
        assert_close(of_rank)


@pytest.mark.slow
def test_so_are_those_of_compiled_passes_whatever_the_number_of_rows() -> None:
    """In a Python of its own: on a CPU, runs and tests have nothing compiled."""
    said = run_python("-m", "tests.megatron.hooks.test_cross_entropy", timeout_s=200, TORCH_COMPILE_DISABLE="0")
    assert_close(json.loads(said.stdout.splitlines()[-1]))


def assert_close(of_rank: dict[str, dict[str, float]]) -> None:
    for case, found in of_rank.items():
        assert found["loss"] < 2e-5 and found["without gradient"] < 2e-5, case
        assert found["gradient"] < BOUNDS[case.partition(",")[0]], case
        assert found["changed"] == 0, f"{case}: the logits stay as they are"


if __name__ == "__main__":
    print(json.dumps(errors_of_compiled()))
