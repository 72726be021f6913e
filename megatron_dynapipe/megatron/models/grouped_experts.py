"""Megatron's local experts, each of whose two linears is one product for all of them: PyTorch's `grouped_mm`.

    tokens    a a a b b c c c c        Megatron runs expert after expert: two products, an activation and their
    weights   A     B   C              backward functions for each, which with many experts takes the host longer than
                                       the device

Weights stay Megatron's experts' weights, with their names and gradients. They are put one behind another for each
product, which takes a copy, and again in the backward pass rather than kept.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from megatron_dynapipe.megatron.models.divided_linears import DividedModule, Operand, Product, WeightHalves

_ANCHOR = torch.empty(0, requires_grad=True)
"""An input that makes autograd run a product's backward whose tokens need no gradient; it never gets one."""
HOPPER = (9, 0)


def takes_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped_mm` runs without reading offsets on the host, or there is no device to wait for."""
    if device.type == "cpu":
        return True
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= HOPPER


class GroupedExperts(DividedModule, SequentialMLP):
    """Megatron's experts of local layers; where `grouped_mm` has no kernel they run one by one, as Megatron's do."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's.

        Args:
            permuted_local_hidden_states: [tokens, channels], expert after expert.
            tokens_per_expert: int64[experts].
            permuted_probs: [tokens].

        Returns:
            Like the tokens; and no bias.
        """
        hidden = permuted_local_hidden_states
        if self.num_local_experts == 1 or not takes_grouped(hidden.device, hidden.dtype):
            one_by_one: tuple[Tensor, Tensor | None] = super().forward(hidden, tokens_per_expert, permuted_probs)
            return one_by_one
        offsets = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        together = copy.copy(self.local_experts[0])  # Megatron's activation and switches around our products
        for name in ("linear_fc1", "linear_fc2"):
            linears = [getattr(expert, name) for expert in self.local_experts]
            vars(together)[name] = _Grouped(linears, offsets, self.halves)
        output: tuple[Tensor, Tensor | None] = MLP.forward(together, hidden, permuted_probs)
        return output


class _Grouped(nn.Module):
    """One linear of all experts, called as Megatron's; it has no parameters of its own."""

    def __init__(self, linears: Sequence[nn.Module], offsets: Tensor, halves: WeightHalves | None) -> None:
        super().__init__()
        self._linears = linears
        self._offsets = offsets
        self._halves = halves

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The products, and no bias. Hooks on the experts' linears wait for gathers of their parameters."""
        for linear in self._linears:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, (hidden,))
        weights = [linear.weight for linear in self._linears]
        leave = None
        visible = weights
        if self._halves is not None and self._halves.key is not None:
            leave = partial(self._halves.leave, self._halves.key)
            visible = []
        output: Tensor = _GroupedLinear.apply(leave, weights, self._offsets, _ANCHOR, hidden, *visible)
        return output, None


class _GroupedLinear(torch.autograd.Function):
    """Tokens [t, i] in groups that end at `offsets`, times a weight [o, i] for each: [t, o]."""

    @staticmethod
    def forward(
        ctx: Any, leave: Any, weights: list[Tensor], offsets: Tensor, anchor: Tensor, hidden: Tensor, *visible: Tensor
    ) -> Tensor:
        ctx.leave = leave
        ctx.weights = weights
        ctx.save_for_backward(hidden, offsets)
        return _product(hidden, torch.stack(weights).transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, offsets = ctx.saved_tensors
        of_output = gradients[0].contiguous()
        of_hidden = _product(of_output, torch.stack(ctx.weights), offsets)
        of_weights = partial(_weight_gradients, offsets)
        if ctx.leave is not None:
            ctx.leave(Product(ctx.weights, (Operand(hidden), Operand(of_output)), of_weights))
            return None, None, None, None, of_hidden
        return None, None, None, None, of_hidden, *of_weights(hidden, of_output)


def _product(tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Tokens [t, n] times weights [groups, n, m]; a rank that got no tokens goes the way of the others, whose gradients
    are reduced in the order in which this one's must become ready.
    """
    return grouped_mm(tokens, weights, offs=offsets) if len(tokens) else tokens.new_zeros(0, weights.size(2))


def _weight_gradients(offsets: Tensor, hidden: Tensor, of_output: Tensor) -> tuple[Tensor, ...]:
    if not len(hidden):
        return hidden.new_zeros(len(offsets), of_output.size(1), hidden.size(1)).unbind()
    return grouped_mm(of_output.t(), hidden, offs=offsets).unbind()
