"""Which tensors cross each boundary between virtual stages, and their shapes.

    T5, 2 + 2 layers on 4 stages      encoder │ encoder │ decoder │ decoder
    tensors at the three boundaries         {enc}     {enc}   {enc, dec}

Decoder stages pass on the encoder's output beside their own state, since every decoder layer attends to it.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dynapipe.cost.layout import PipelineLayout
from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.plan.instructions import TensorShape
from megatron_dynapipe.units import Shape


class BoundaryTensor(enum.StrEnum):
    """A hidden state that crosses a boundary."""

    ENCODER = "encoder"
    """[input length, size, hidden]; decoder-only models have only this one."""
    DECODER = "decoder"
    """[target length, size, hidden]"""


BoundaryTensors = tuple[tuple[BoundaryTensor, ...], ...]
"""Per boundary v → v + 1 between virtual stages, the tensors that cross it, in the order in which they are sent."""

BoundaryShapes = tuple[tuple[tuple[TensorShape, ...], ...], ...]
"""[micro-batch][boundary v → v + 1]: the shape of every tensor that crosses. Gradients cross back in equal shapes."""


def boundary_tensors(layout: PipelineLayout) -> BoundaryTensors:
    """The tensors at every boundary between virtual stages."""
    both = (BoundaryTensor.ENCODER, BoundaryTensor.DECODER)
    return tuple(both if decoder else both[:1] for decoder in layout.decoder_state_forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySettings:
    """All that a boundary's shapes depend on besides the micro-batch."""

    tensors: BoundaryTensors
    hidden_size: int
    sequence_parallel: int = 1
    """Ranks over which the first dimension is sharded: the tensor-parallel size under sequence parallelism, else 1."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.sequence_parallel < 1:
            raise PlanningError(
                f"expected a hidden size and a sequence-parallel size of at least 1, got {self.hidden_size} and "
                f"{self.sequence_parallel}"
            )

    def shapes(self, micro_batches: Sequence[Shape]) -> BoundaryShapes:
        """The shapes at every boundary for every micro-batch.

        Raises:
            PlanningError: a length is not divisible by the sequence-parallel size.
        """
        return tuple(self._of(shape) for shape in micro_batches)

    def _of(self, shape: Shape) -> tuple[tuple[TensorShape, ...], ...]:
        rank_shape: dict[BoundaryTensor, TensorShape] = {}
        for tensor, length in zip(BoundaryTensor, (shape.input_length, shape.target_length), strict=True):
            if length % self.sequence_parallel:
                raise PlanningError(
                    f"expected the lengths of shape {shape} to be divisible by the sequence-parallel size "
                    f"{self.sequence_parallel}",
                    hint="use a tensor-parallel size that divides 8, or turn sequence parallelism off",
                )
            rank_shape[tensor] = (length // self.sequence_parallel, shape.size, self.hidden_size)
        return tuple(tuple(rank_shape[tensor] for tensor in tensors) for tensors in self.tensors)
