"""Positions in a T5's layers, other than learned embeddings: rotary embeddings and relative position biases."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from torch import Tensor, nn

from megatron_dynapipe.megatron.models.padded_rows import AttentionRows

LEARNED, ROTARY, RELATIVE = "learned_absolute", "rope", "relative"
T5_POSITIONS = (LEARNED, ROTARY, RELATIVE, "none")
"""Values of `--position-embedding-type` that a staged T5 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackInputs:
    """The inputs of one stack on one stage.

    Attributes:
        state: [length, b, h]; divided in its first dimension under sequence parallelism.
        mask: its self-attention's mask.
        arguments: further ones of Megatron's block: rotations, biases, the packed row.
    """

    state: Tensor
    mask: Any
    arguments: dict[str, Any]


class StackPositions:
    """The arguments that one stack on one stage hands to its layers with their input.

    Args:
        rotary: Megatron's `RotaryEmbedding`, or None.
        table: the stage's copy of the stack's relative biases, or None.
        tp_group: over whose ranks the heads are divided.
        causal: whether biases are to hide later keys too.
        biases_hide: whether biases say by themselves which keys are forbidden, so that layers are given no mask.
    """

    def __init__(
        self,
        rotary: Callable[[int], Tensor] | None,
        table: nn.Module | None,
        tp_group: torch.distributed.ProcessGroup,
        *,
        causal: bool,
        biases_hide: bool,
    ) -> None:
        self._rotary = rotary
        self._table = table
        self._tp_group = tp_group
        self._causal = causal
        self._biases_hide = biases_hide

    def of(self, state: Tensor, mask: Any, length: int, row: AttentionRows | None = None) -> StackInputs:
        """The stack's input and what its layers take with it.

        Args:
            state: the stack's input, as in `StackInputs`.
            mask: its self-attention's mask, in the layers' form.
            length: positions of the whole sequence; of a packed row's longest segment.
            row: where samples lie, for layers without masks.
        """
        arguments: dict[str, Any] = {} if row is None else {"packed_seq_params": row}
        if self._rotary is not None:
            rotations = self._rotary(length)
            arguments["rotary_pos_emb"] = rotations if row is None else row.pick(rotations)
        if self._table is not None:
            biases = self._table(length, length).permute(0, 2, 3, 1)
            biases = scatter_to_tensor_model_parallel_region(biases, self._tp_group).permute(0, 3, 1, 2)
            biases = biases.contiguous()  # Transformer Engine's fused attention reads it by its address and shape
            if self._biases_hide:
                biases = self._with_mask(biases.to(state.dtype), mask)
                mask = None
            state, arguments["attention_bias"] = shared_over_layers(state, biases)
        return StackInputs(state=state, mask=mask, arguments=arguments)

    def _with_mask(self, biases: Tensor, mask: Tensor | None) -> Tensor:
        """Biases with -inf where attention is forbidden, once for all layers."""
        if self._causal:
            later = torch.ones(biases.shape[-2:], dtype=torch.bool, device=biases.device).triu(1)
            biases = biases.masked_fill(later, -math.inf)
        return biases if mask is None else biases + mask


def shared_over_layers(state: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`value` for use by all layers that follow from `state`; each of them may be computed again on its own.

    Megatron's recomputation runs a backward pass of its own for each layer, in which every layer would go back through
    the graph that made `value`, and only the first would find it. So the layers get a leaf, which gathers their
    gradients, and its sum goes on when the gradient of `state` comes by: after all layers' backward passes.
    """
    if not (torch.is_grad_enabled() and value.requires_grad):
        return state, value
    leaf = value.detach().requires_grad_()
    return _Gathered.apply(state, value, [leaf]), leaf


class _Gathered(torch.autograd.Function):
    """Passes the state on; in the backward pass, adds the leaf's gradient to the value's.

    The leaf comes in a list, so that autograd does not take it for an input, whose gradient would wait for this one.
    """

    @staticmethod
    def forward(context: Any, state: Tensor, _value: Tensor, leaf: list[Tensor]) -> Tensor:
        context.leaf = leaf
        return state.view_as(state)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradient, context.leaf.pop().grad, None
