"""Backward passes of Megatron's parallel linear layers in two halves.

    first half    gradient of the input, and its collectives; gradient of the bias
    second half   gradient of the weight, from the input and the output's gradient that the first half has left

A forward pass whose backward pass the plan divides runs the layers' linears through a function that hides the weight
from autograd: so nothing touches the weight's gradient, nor the hooks on it, before the second half. All other passes
run Megatron's own function. Embedding, head, norms and attention belong to the first half.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

_ANCHOR = torch.empty(0, requires_grad=True)
"""What makes autograd run the backward of a linear whose input needs no gradient; it never gets one."""
_MARK = "_dynapipe_weight_halves"

Key = tuple[int, int]
"""(micro-batch, chunk)"""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One linear's settings, as Megatron's layers pass them."""

    weight: Tensor
    adds_to_main_grad: bool
    sums_input_gradient: bool
    gathers_input: bool
    group: Any


_Left = tuple[_Call, Tensor, Tensor]
"""A linear's call, its input and the gradient of its output."""


@dataclass(slots=True, eq=False)
class WeightHalves:
    """What first halves leave to second ones.

    Attributes:
        key: of the pass that runs, if its backward pass is divided.
    """

    key: Key | None = None
    _left: dict[Key, list[_Left]] = field(default_factory=dict)

    def leave(self, key: Key, call: _Call, given: Tensor, gradient: Tensor) -> None:
        """Keep a linear's input and its output's gradient for the second half."""
        self._left.setdefault(key, []).append((call, given, gradient))

    def add_weight_gradients(self, key: Key, done: Callable[[Collection[Tensor]], None] | None = None) -> None:
        """Run the second half, through graphs of the weights alone, so that the hooks on them run.

        Args:
            key: of the first half.
            done: called after each weight, from the model's end to its start, with those that are still to come;
                without it all weights are one graph.
        """
        left = self._left.pop(key, [])[::-1]
        pending = Counter(call.weight for call, _, _ in left)
        while left and done is not None:
            pending -= Counter([left[-1][0].weight])
            _add_gradients([left.pop()])
            done(pending)
        _add_gradients(left)

    def clear(self) -> None:
        """Drop what an iteration that did not end has left."""
        self.key = None
        self._left.clear()

    def linear(self, megatrons: Callable[..., Tensor], **settings: Any) -> Tensor:
        """In place of a layer's `_forward_impl`."""
        weight: Tensor = settings["weight"]
        if self.key is None or not torch.is_grad_enabled() or not weight.requires_grad:
            return megatrons(**settings)
        call = _Call(
            weight,
            settings["gradient_accumulation_fusion"],
            settings["allreduce_dgrad"],
            settings["sequence_parallel"],
            settings["tp_group"],
        )
        output: Tensor = _DividedLinear.apply(self, call, _ANCHOR, settings["input"], settings["bias"])  # type: ignore[no-untyped-call]
        return output


class _DividedLinear(torch.autograd.Function):
    """A linear whose backward makes the gradients of its input and bias."""

    @staticmethod
    @layers.custom_fwd
    def forward(
        ctx: Any, halves: WeightHalves, call: _Call, anchor: Tensor, given: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.halves, ctx.call, ctx.key, ctx.has_bias = halves, call, halves.key, bias is not None
        ctx.save_for_backward(given)
        output = torch.matmul(_gathered(call, given), call.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (given,) = ctx.saved_tensors
        call: _Call = ctx.call
        made = gradient.matmul(call.weight)
        if call.gathers_input:
            whole, made = made, torch.empty_like(given)
            layers.dist_reduce_scatter_func(made, whole.contiguous(), group=call.group)
        elif call.sums_input_gradient:
            torch.distributed.all_reduce(made, group=call.group)
        ctx.halves.leave(ctx.key, call, given, gradient)
        of_bias = gradient.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
        return None, None, None, made, of_bias


def _add_gradients(left: list[_Left]) -> None:
    """Add the gradients of weights up, the last entry's first, since autograd runs the latest node first."""
    ends = [_WeightGradient.apply([operands], operands[0].weight) for operands in left]  # type: ignore[no-untyped-call]
    left.clear()
    if ends:
        torch.autograd.backward(ends, ends)


class _WeightGradient(torch.autograd.Function):
    """The second half of one linear's backward. Autograd takes what it returns as the gradient, without a copy.

    Its operands are alone in a list, so that they can be dropped once they are used.
    """

    @staticmethod
    def forward(ctx: Any, operands: list[_Left], weight: Tensor) -> Tensor:
        ctx.operands = operands
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor | None]:
        return None, _weight_gradient(*ctx.operands.pop())


def _gathered(call: _Call, given: Tensor) -> Tensor:
    """The whole sequence, where the tensor-parallel ranks share it."""
    if not call.gathers_input:
        return given
    whole = given.new_empty((given.shape[0] * call.group.size(), *given.shape[1:]))
    layers.dist_all_gather_func(whole, given.contiguous(), group=call.group)
    return whole


def _weight_gradient(call: _Call, given: Tensor, gradient: Tensor) -> Tensor | None:
    """As the backward of Megatron's own function: where the product adds it up itself, a stand-in or None."""
    weight: Any = call.weight
    rows, columns = gradient.flatten(0, -2).contiguous(), _gathered(call, given).flatten(0, -2).contiguous()
    if not call.adds_to_main_grad:
        return rows.t().matmul(columns)
    fused: Any = layers.fused_weight_gradient_mlp_cuda
    single = weight.main_grad.dtype == torch.float32
    (fused.wgrad_gemm_accum_fp32 if single else fused.wgrad_gemm_accum_fp16)(columns, rows, weight.main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like)(weight)


def weight_halves(models: Sequence[nn.Module]) -> WeightHalves:
    """Those of a rank's model chunks, whose layers' linears go through them from the first call on."""
    found = models[0].__dict__.get(_MARK)
    if isinstance(found, WeightHalves):
        return found
    halves = models[0].__dict__[_MARK] = WeightHalves()
    for model in models:
        for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
            for linear in layer.modules():
                if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                    vars(linear)["_forward_impl"] = partial(halves.linear, linear._forward_impl)
    return halves
