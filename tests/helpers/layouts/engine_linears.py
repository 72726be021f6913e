"""Transformer Engine's linears as its source has them (2.3 to 2.20), by plain products, in place of Megatron's.

What counts here is what a backward pass does: it adds the weight's gradient to `main_grad` and returns a stand-in, or
hands the operands to `wgrad_store` and returns no gradient of a bias that its product makes.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class WeightGradStore:
    """As `WeightGradStore(delay_wgrad_compute=False)`."""

    def delay_wgrad_compute(self) -> bool:
        return False


def gathered(linear: Any, tensor: Tensor) -> Tensor:
    """[tp × n, channels] of shares [n, channels]."""
    whole = tensor.new_empty(len(tensor) * linear.tp_size, tensor.size(1))
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=linear.tp_group)
    return whole


def reduced(linear: Any, tensor: Tensor) -> Tensor:
    """Summed over the ranks: a share of it under sequence parallelism, else all."""
    if linear.sequence_parallel:
        share = tensor.new_empty(len(tensor) // linear.tp_size, tensor.size(1))
        dist.reduce_scatter_tensor(share, tensor.contiguous(), group=linear.tp_group)
        return share
    dist.all_reduce(tensor, group=linear.tp_group)
    return tensor


class Linear(torch.autograd.Function):
    """`_Linear` and `_LayerNormLinear` of two dimensions."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: Tensor, bias: Tensor | None, linear: Any) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(weight, inputs)
        sequence = linear.sequence_parallel and linear.tp_size > 1
        whole = gathered(linear, inputs) if sequence and linear.parallel_mode == "column" else inputs
        output = whole @ weight.t()
        if linear.parallel_mode == "row" and linear.tp_size > 1:
            output = reduced(linear, output)
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear, (weight, inputs) = ctx.linear, ctx.saved_tensors
        sequence = linear.sequence_parallel and linear.tp_size > 1
        if sequence and linear.parallel_mode == "row":
            gradient = gathered(linear, gradient)
        if sequence and linear.parallel_mode == "column":
            inputs = gathered(linear, inputs)
        of_inputs = gradient @ weight
        if linear.parallel_mode == "column" and linear.tp_size > 1:
            of_inputs = reduced(linear, of_inputs)

        def product(whole: Tensor, of_output: Tensor) -> tuple[Tensor, Tensor]:
            weight.main_grad.addmm_(of_output.t(), whole)
            return weight.main_grad, of_output.sum(dim=0)

        of_bias = None
        if linear.wgrad_store.delay_wgrad_compute():
            linear.wgrad_store.put([inputs, gradient], product)
        else:
            of_bias = product(inputs, gradient)[1]
            of_bias = of_bias if linear.apply_bias else None
        weight.grad_added_to_main_grad = True
        return torch.full_like(weight, torch.nan), of_inputs, of_bias, None  # its stand-ins are not initialised


class EngineLinear(nn.Module):
    """Megatron's wrappers of `Linear`: a row's bias is returned, a column's too where the layer adds it."""

    apply_bias: bool

    def forward(self, inputs: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        linear: Any = self
        bias = linear.bias if self.apply_bias else None
        output = Linear.apply(linear.weight, inputs.flatten(0, -2), bias, self)
        return output.view(-1, inputs.size(1), output.size(1)), linear.bias if linear.skip_bias_add else None


class Column(EngineLinear, ColumnParallelLinear):
    parallel_mode = "column"


class Row(EngineLinear, RowParallelLinear):
    parallel_mode = "row"


def as_engine_has_them(model: nn.Module) -> None:
    """Turn the linears of a model's layers into these; their names and weights stay."""
    kinds = {ColumnParallelLinear: Column, RowParallelLinear: Row}
    for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
        for linear in (module for module in layer.modules() if type(module) in kinds):
            given: Any = linear
            given.__class__ = kinds[type(linear)]
            given.tp_size = given.tp_group.size()
            given.apply_bias = given.bias is not None and not given.skip_bias_add
            given.gemm_bias_unfused_add = False
            given.wgrad_store = WeightGradStore()
