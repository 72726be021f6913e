"""Positions in a T5's layers, besides learned embeddings: rotary embeddings and relative position biases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

LEARNED, ROTARY, RELATIVE = "learned_absolute", "rope", "relative"
T5_POSITIONS = (LEARNED, ROTARY, RELATIVE, "none")
"""Values of `--position-embedding-type` that a staged T5 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What positions are made of; names and defaults are Megatron's.

    Attributes:
        kind: one of `T5_POSITIONS`.
        rotary_percent: share of a head's channels that are rotated.
        rotary_base: of the rotations' frequencies.
        rotary_interpolation: factor by which longer sequences are squeezed; None for none.
        relative_buckets: rows of a table of relative biases.
        relative_max_distance: distance from which all positions share a bucket.
    """

    kind: str = LEARNED
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    rotary_interpolation: float | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128

    def table(self, config: TransformerConfig, *, bidirectional: bool) -> RelativePositionEmbedding:
        """Biases [buckets, heads] of a stack, whole on every tensor-parallel rank."""
        return RelativePositionEmbedding(
            bidirectional=bidirectional,
            init_method=config.init_method,
            num_attention_heads=config.num_attention_heads,
            relative_attention_num_buckets=self.relative_buckets,
            relative_attention_max_distance=self.relative_max_distance,
        )


class StackPositions:
    """What one stack on one stage hands to its layers beside their input.

    Args:
        rotary: Megatron's `RotaryEmbedding`, or None.
        table: the stage's copy of the stack's relative biases, or None.
        tp_group: over whose ranks the heads are divided.
    """

    def __init__(
        self, rotary: Callable[[int], Tensor] | None, table: nn.Module | None, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        self._rotary, self._table, self._tp_group = rotary, table, tp_group

    def of(self, state: Tensor, length: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The stack's input and the arguments for its layers.

        Args:
            state: the stack's input [length, b, h]; divided in its first dimension under sequence parallelism.
            length: positions of the whole sequence.
        """
        arguments: dict[str, Tensor] = {}
        if self._rotary is not None:
            arguments["rotary_pos_emb"] = self._rotary(length)
        if self._table is not None:
            biases = self._table(length, length).permute(0, 2, 3, 1)
            biases = scatter_to_tensor_model_parallel_region(biases, self._tp_group).permute(0, 3, 1, 2)
            state, arguments["attention_bias"] = shared_over_layers(state, biases)
        return state, arguments


def shared_over_layers(state: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`value` for use by all layers that follow from `state`, each of which may be computed again on its own.

    Megatron's recomputation runs a backward pass of its own for each layer, in which every layer would go back through
    the graph that made `value`, and only the first would find it. So the layers get a leaf, which gathers their
    gradients, and its sum goes on when the gradient of `state` comes by: after all layers' backward passes.
    """
    if not (torch.is_grad_enabled() and value.requires_grad):
        return state, value
    leaf = value.detach().requires_grad_()
    return _Gathered.apply(state, value, [leaf]), leaf  # type: ignore[no-untyped-call]


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
