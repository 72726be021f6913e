"""Profiles add gradients up in buffers of the type that training has: adding bf16 to fp32 costs more than to bf16."""

from argparse import Namespace

from tests.helpers.processes import run_ranks


def buffers(rank: int, world_size: int) -> dict[str, object]:
    import torch

    from megatron_dynapipe import cpu

    cpu.enable()
    from megatron_dynapipe.integration.profiling.layers import accumulate_gradients, gradient_dtype

    chosen = [
        gradient_dtype(Namespace(params_dtype=dtype, accumulate_allreduce_grads_in_fp32=in_fp32))
        for dtype, in_fp32 in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False))
    ]
    layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    accumulate_gradients(layer, chosen[0])
    for _ in range(2):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    return {
        "chosen": [str(dtype) for dtype in chosen],
        "buffer": [str(layer.weight.main_grad.dtype), layer.weight.main_grad.tolist()[0], layer.weight.grad is None],
    }


def test_buffers_are_those_of_training():
    (found,) = run_ranks(buffers, 1)
    assert found["chosen"] == ["torch.float32", "torch.bfloat16", "torch.float32"]
    assert found["buffer"] == ["torch.float32", [2.0] * 4, True]
