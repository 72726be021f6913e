"""Fused kernels of PyTorch under Megatron: the same steps and gradients as without them."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dynapipe.megatron.hooks import fused_kernels
from megatron_dynapipe.megatron.hooks.originals import Originals
from tests.helpers.layouts.compare import deviation
from tests.helpers.layouts.layout import Layout, on_ranks, reference, table
from tests.helpers.processes import in_ranks


def adam(cls: type[torch.optim.Adam], *, fused: bool) -> tuple[torch.optim.Adam, list[torch.nn.Parameter]]:
    """Two groups of parameters that have made three steps without fusion."""
    draw = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(n, 33, generator=draw)) for n in (1, 7, 64)]
    groups = [{"params": parameters[:1], "weight_decay": 0.0}, {"params": parameters[1:], "lr": 3e-3}]
    made = cls(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(8):
        if step == 3 and fused:
            fused_kernels.fuse_adam(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=made)]))
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        made.step()
    return made, parameters


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_a_fused_step_is_an_unfused_one(cls: type[torch.optim.Adam]) -> None:
    plain, fused = adam(cls, fused=False), adam(cls, fused=True)
    assert [group["fused"] for group in fused[0].param_groups] == [True, True]
    assert {float(state["step"]) for state in fused[0].state.values()} == {8.0}
    for one, other in zip(plain[1], fused[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_other_optimizers_stay_as_they_are() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    before = dict(sgd.param_groups[0])
    fused_kernels.fuse_adam(SimpleNamespace(optimizer=sgd))
    fused_kernels.fuse_adam(None)
    assert sgd.param_groups[0] == before


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("torch.optim.adamw", "Adam of PyTorch, fused"),
        ("transformer_engine.pytorch.optimizers.fused_adam", "Adam of Transformer Engine, fused"),
        ("apex.optimizers.fused_adam", "Adam of apex, fused"),
    ],
)
def test_the_optimizer_that_runs_is_said(monkeypatch: pytest.MonkeyPatch, module: str, words: str) -> None:
    import megatron.core.optimizer as made

    monkeypatch.setattr(made, "Adam", type("Adam", (), {"__module__": module}))
    assert fused_kernels.optimizer_in_words("adam") == words
    assert fused_kernels.optimizer_in_words("sgd") == "sgd"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("inputs", "buffer"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_weight_gradient_is_added_to_its_buffer(inputs: torch.dtype, buffer: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x, g, into = (torch.randn(shape, generator=draw) for shape in ((24, 8), (24, 16), (16, 8)))
    x, g, into = x.to(device, inputs), g.to(device, inputs), into.to(device, buffer)
    expected = into.double() + g.double().t() @ x.double()
    kernels = fused_kernels.WeightGradients
    add = kernels.wgrad_gemm_accum_fp32 if buffer == torch.float32 else kernels.wgrad_gemm_accum_fp16
    add(x, g, into)
    torch.testing.assert_close(into.double(), expected, rtol=2e-2 if inputs != torch.float32 else 1e-5, atol=1e-1)


def test_where_a_product_cannot_add_up_gradients_are_added_after_it(monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("torch.addmm", refuse)
    assert not fused_kernels._product_adds_up(torch.device("meta"), torch.bfloat16)
    assert "PyTorch refuses here: no such kernel" in capsys.readouterr().out
    fused_kernels._product_adds_up.cache_clear()


@in_ranks(1)
def test_they_are_applied_and_reverted():
    import megatron.core.optimizer as made
    from megatron.core.tensor_parallel import layers
    from megatron.training import training

    own = made.get_megatron_optimizer
    fused_kernels.install(originals := Originals())
    assert training.get_megatron_optimizer is made.get_megatron_optimizer is not own
    assert layers._grad_accum_fusion_available
    assert layers.fused_weight_gradient_mlp_cuda is fused_kernels.WeightGradients
    originals.revert()
    assert training.get_megatron_optimizer is made.get_megatron_optimizer is own
    assert not layers._grad_accum_fusion_available
    assert not hasattr(layers, "fused_weight_gradient_mlp_cuda")


LAYOUTS = (
    "gpt 1x2x1, every second divided, fused *",
    "t5 1x2x2, overlapped, distributed optimizer, fused",
    "gpt 2x1x1, sequence parallel, full, fused",
    "gpt 1x2x1, two chunks, untied, fused",
)


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_weight_gradients_added_up_by_products_train_the_same(layout: Layout) -> None:
    assert max(deviation(on_ranks("trainer.train", layout), reference(layout.model))) <= 1e-4
