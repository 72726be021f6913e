"""Profiles add gradients up in buffers of the type that training has: adding bf16 to fp32 costs more than to bf16."""

from tests.helpers.processes import run_ranks


def buffers(rank: int, world_size: int) -> dict[str, object]:
    import torch

    from megatron_dynapipe import cpu

    cpu.enable()
    from megatron_dynapipe.integration.profiling.layers import accumulate_gradients

    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    accumulate_gradients(layer, torch.float32)
    for _ in range(2):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    return {
        "buffer": [str(layer.weight.main_grad.dtype), layer.weight.main_grad.tolist()[0], layer.weight.grad is None]
    }


def test_buffers_are_those_of_training():
    (found,) = run_ranks(buffers, 1)
    assert found["buffer"] == ["torch.float32", [2.0] * 4, True]
