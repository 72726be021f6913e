"""Profiles add gradients up in buffers of the type that training has: adding bf16 to fp32 costs more than to bf16."""

from tests.helpers.processes import in_ranks


@in_ranks(1)
def test_buffers_are_those_of_training():
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear

    from megatron_dynapipe.megatron.hooks import fused_kernels
    from megatron_dynapipe.megatron.hooks.originals import Originals
    from megatron_dynapipe.megatron.profiling.layers import accumulate_gradients

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    fused_kernels.install(Originals())
    for fused in (False, True):
        layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        accumulate_gradients(layer, torch.float32)
        for _ in range(2):
            inputs = torch.ones(1, 1, 4, dtype=torch.bfloat16)
            linear(inputs, layer.weight, None, fused, False, False).sum().backward()
        buffer = layer.weight.main_grad
        assert buffer.dtype == torch.float32 and buffer.tolist()[0] == [2.0] * 4 and layer.weight.grad is None
