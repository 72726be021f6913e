"""A stage's passes: the handlers of `Load` and of all kinds of passes, and the autograd graphs that wait between them.

    received tensors ──enter──► [the stage's forward] ──leave──► outputs, sent and dropped
    their gradients  ◄─────────────── backward ──────────────── gradients of the outputs

A stage keeps the *gradient edge* of each output, not the output: its storage goes once it has been sent. One backward
over all edges lets autograd add what returns for a tensor that was handed on to what the stage itself makes of it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_dynapipe.core.executor import BufferTable, Handlers
from megatron_dynapipe.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Instruction,
    Load,
    Pass,
)

_ANCHOR = torch.empty(0, requires_grad=True)
"""An input by which autograd gives received tensors a place in a graph; it never gets a gradient."""


class Entry:
    """The tensors at which a graph begins: what a forward received, and later the gradients of it.

    The tensors get a gradient function instead of becoming leaves, so that a stage may begin with an operation in
    place. Those that are not differentiable pass as they are.

    Args:
        tensors: what was received.
        differentiable: which of them want a gradient; by default all of a floating dtype.

    Attributes:
        tensors: what the forward is to be given; emptied by `StageGraph`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], differentiable: Sequence[bool] | None = None) -> None:
        if differentiable is None:
            differentiable = _floating(tensors)
        self.tensors: Sequence[torch.Tensor] = tensors
        self._gradients: list[torch.Tensor | None] = []
        self._metas: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        entering = [tensor.detach() for tensor, wants in zip(tensors, differentiable, strict=True) if wants]
        if entering and torch.is_grad_enabled():
            self._metas = [(tensor.shape, tensor.dtype, tensor.device) for tensor in entering]
            self._gradients = [None] * len(entering)
            placed = iter(_Enter.apply(self, _ANCHOR, *entering))
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
    """The part of a forward pass that its backward pass needs.

    Attributes:
        entry: where the graph begins.
        edges: the differentiable outputs' edges, in their order; None if nothing is to be differentiated.
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
            gradients: the differentiable outputs' gradients, in their order; none if the graph ends in a loss.
            scale: makes of the loss what gradients are taken of.

        Returns:
            Gradients of the differentiable tensors that were received.
        """
        if self.loss is None:
            leaving = [(edge, g) for edge, g in zip(self.edges, gradients, strict=True) if edge is not None]
            if leaving:
                torch.autograd.backward([edge for edge, _ in leaving], [gradient for _, gradient in leaving])
        elif self.loss.requires_grad:
            torch.autograd.backward(self.loss if scale is None else scale(self.loss))
        return self.entry.take_gradients()


class StageModel(Protocol):
    """The model that a rank's passes run in one step: Megatron's model chunks, or a part of any other model.

    Virtual stage `chunk × stages + stage` is chunk `chunk` of stage `stage`; boundary v follows virtual stage v.
    """

    def load(self, micro_batch: int) -> Any:
        """The inputs of a micro-batch's forward passes other than received tensors, on the device."""
        ...

    def around_pass(self, instruction: Pass) -> AbstractContextManager[object]:
        """Set the modules for a pass, which runs inside."""
        ...

    def differentiable(self, micro_batch: int, boundary: int) -> Sequence[bool] | None:
        """Flags of a boundary's tensors that have gradients; None says that tensors of a floating dtype have."""
        ...

    def forward(self, micro_batch: int, chunk: int, received: Sequence[torch.Tensor], data: Any) -> Any:
        """Run a virtual stage: the tensors to be sent, on the last one the micro-batch's loss."""
        ...

    def add_weight_gradients(self, micro_batch: int, chunk: int) -> None:
        """Run what the first half of a divided backward pass has left."""
        ...

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that gradients are taken of."""
        ...

    def totals(self) -> torch.Tensor:
        """Sum of the losses so far and the number of what they are sums of: float64[2]; zeros on other stages."""
        ...


@dataclass(slots=True, kw_only=True)
class PassContext:
    """The state that the handlers of one step share.

    Attributes:
        stage, stages, chunks: this rank's place in the pipeline, and the virtual stages of each rank.
        forward_only: nothing is kept for a backward pass.
        losses_left: forward passes of the last virtual stage that are still to run on this rank.
        on_last_loss: called once there are none.
        graphs: the graphs of forward passes whose backward has not run, by (micro-batch, chunk).
    """

    model: StageModel
    stage: int
    stages: int
    chunks: int
    forward_only: bool = False
    losses_left: int = 0
    on_last_loss: Callable[[], None] = lambda: None
    graphs: dict[tuple[int, int], StageGraph] = field(default_factory=dict)

    def virtual_stage(self, chunk: int) -> int:
        """The virtual stage of one of this rank's chunks."""
        return chunk * self.stages + self.stage

    def is_last(self, chunk: int) -> bool:
        """Whether the pipeline ends with this chunk."""
        return self.virtual_stage(chunk) == self.stages * self.chunks - 1


def _load(context: PassContext, instruction: Load, buffers: BufferTable) -> None:
    buffers.put(Buffer.DATA, instruction.micro_batch, 0, context.model.load(instruction.micro_batch))


def _forward(context: PassContext, instruction: Forward, buffers: BufferTable) -> None:
    micro_batch = instruction.micro_batch
    chunk = instruction.chunk
    model = context.model
    stage = context.virtual_stage(chunk)
    received = buffers.tensors(Buffer.INPUT, micro_batch, chunk) if stage else ()
    with model.around_pass(instruction), torch.set_grad_enabled(not context.forward_only):
        entry = Entry(received, model.differentiable(micro_batch, stage - 1) if stage else ())
        outputs = model.forward(micro_batch, chunk, entry.tensors, buffers.get(Buffer.DATA, micro_batch, 0))
        if context.is_last(chunk):
            graph = StageGraph.to_loss(entry, outputs)
        else:
            buffers.put(Buffer.OUTPUT, micro_batch, chunk, [tensor.detach() for tensor in outputs])
            flags = model.differentiable(micro_batch, stage)
            wants = _floating(outputs) if flags is None else flags
            graph = StageGraph.to_outputs(entry, [t for t, is_wanted in zip(outputs, wants, strict=True) if is_wanted])
    if not context.forward_only:
        context.graphs[micro_batch, chunk] = graph
    if context.is_last(chunk):
        context.losses_left -= 1
        if not context.losses_left:
            context.on_last_loss()


def _backward(context: PassContext, instruction: Backward | BackwardInput, buffers: BufferTable) -> None:
    micro_batch = instruction.micro_batch
    chunk = instruction.chunk
    gradients = () if context.is_last(chunk) else buffers.tensors(Buffer.OUTPUT_GRAD, micro_batch, chunk)
    graph = context.graphs.pop((micro_batch, chunk))
    with context.model.around_pass(instruction):
        input_gradients = graph.backward(gradients, scale=context.model.scale_loss)
    if context.virtual_stage(chunk):
        buffers.put(Buffer.INPUT_GRAD, micro_batch, chunk, input_gradients)


def _backward_weight(context: PassContext, instruction: BackwardWeight, buffers: BufferTable) -> None:
    with context.model.around_pass(instruction):
        context.model.add_weight_gradients(instruction.micro_batch, instruction.chunk)


PASS_HANDLERS: Mapping[type[Instruction], Callable[[PassContext, Any, BufferTable], None]] = MappingProxyType(
    {
        Load: _load,
        Forward: _forward,
        Backward: _backward,
        BackwardInput: _backward,
        BackwardWeight: _backward_weight,
    }
)
"""Handlers by the type of instruction; `pass_handlers` gives each its context."""


def pass_handlers(context: PassContext) -> Handlers:
    """The handlers of one step's passes, for `PipelineExecutor.execute`."""
    return {kind: partial(handler, context) for kind, handler in PASS_HANDLERS.items()}


def _floating(tensors: Sequence[torch.Tensor]) -> list[bool]:
    return [tensor.is_floating_point() for tensor in tensors]
