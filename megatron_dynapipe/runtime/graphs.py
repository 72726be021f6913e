"""Autograd graphs of forward passes that wait for their backward passes.

    received tensors ──enter──► [the stage's forward] ──leave──► outputs, sent and dropped
    their gradients  ◄─────────────── backward ──────────────── gradients of the outputs

A stage keeps the *gradient edge* of each output, not the output: its storage goes once it has been sent. One backward
over all edges lets autograd add what returns for a tensor that was handed on to what the stage itself makes of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

_ANCHOR = torch.empty(0, requires_grad=True)
"""What makes autograd give received tensors a place in a graph; it never gets a gradient."""


class Entry:
    """Where a graph begins: what a forward received, and later the gradients of it.

    The tensors get a gradient function instead of becoming leaves, so that a stage may begin with an operation in
    place. Those that are not differentiable pass as they are.

    Args:
        tensors: what was received.
        differentiable: which of them want a gradient; by default those of a floating dtype.

    Attributes:
        tensors: what the forward is to be given; emptied by `StageGraph`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], differentiable: Sequence[bool] | None = None) -> None:
        if differentiable is None:
            differentiable = [tensor.is_floating_point() for tensor in tensors]
        self.tensors: Sequence[torch.Tensor] = tensors
        self._gradients: list[torch.Tensor | None] = []
        self._metas: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        wanted = [tensor.detach() for tensor, wants in zip(tensors, differentiable, strict=True) if wants]
        if wanted and torch.is_grad_enabled():
            self._metas = [(tensor.shape, tensor.dtype, tensor.device) for tensor in wanted]
            self._gradients = [None] * len(wanted)
            placed = iter(_Enter.apply(self, _ANCHOR, *wanted))  # type: ignore[no-untyped-call]
            self.tensors = [next(placed) if wants else t for t, wants in zip(tensors, differentiable, strict=True)]

    def arrived(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the differentiable tensors; None where nothing depends on one."""
        self._gradients = list(gradients)

    def take_gradients(self) -> tuple[torch.Tensor, ...]:
        """Gradients of the differentiable tensors, zeros where nothing depends on them."""
        return tuple(
            torch.zeros(size, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (size, dtype, device) in zip(self._gradients, self._metas, strict=True)
        )


class _Enter(torch.autograd.Function):
    """The identity, in place; its backward hands the gradients to the entry."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.entry = entry
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.entry.arrived(gradients)
        return (None, None, *(None for _ in gradients))


@dataclass(frozen=True, slots=True, eq=False)
class StageGraph:
    """What a backward pass needs of its forward.

    Attributes:
        entry: where the graph begins.
        edges: of the differentiable outputs, in their order; None where nothing is to be differentiated.
        loss: where the graph ends instead, on the last stage.
    """

    entry: Entry
    edges: Sequence[GradientEdge | None] = ()
    loss: torch.Tensor | None = None

    @classmethod
    def to_outputs(cls, entry: Entry, outputs: Sequence[torch.Tensor]) -> "StageGraph":
        """The graph from an entry to the differentiable outputs, which may be dropped afterwards."""
        entry.tensors = ()
        return cls(entry, [get_gradient_edge(output) if output.requires_grad else None for output in outputs])

    @classmethod
    def to_loss(cls, entry: Entry, loss: torch.Tensor) -> "StageGraph":
        """The graph from an entry to a loss."""
        entry.tensors = ()
        return cls(entry, loss=loss)

    def backward(
        self, gradients: Sequence[torch.Tensor] = (), *, scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Run the backward pass.

        Args:
            gradients: of the differentiable outputs, in their order; none where the graph ends in a loss.
            scale: makes of the loss what gradients are taken of.

        Returns:
            Gradients of the differentiable tensors that were received.
        """
        if self.loss is None:
            wanted = [(edge, g) for edge, g in zip(self.edges, gradients, strict=True) if edge is not None]
            if wanted:
                torch.autograd.backward([edge for edge, _ in wanted], [gradient for _, gradient in wanted])
        elif self.loss.requires_grad:
            torch.autograd.backward(self.loss if scale is None else scale(self.loss))
        return self.entry.take_gradients()
