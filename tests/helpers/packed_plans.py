"""Plans re-laid by hand: the same micro-batches and passes, some or all of them as packed rows."""

from collections.abc import Callable

import msgspec

from megatron_dynapipe.plan.instructions import Instruction, TensorShape
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch, ReplicaPlan
from megatron_dynapipe.plan.packing import packed_shape
from megatron_dynapipe.units import BatchLayout, ModelFamily, Shape

LAYOUTS: dict[str, Callable[[int], bool]] = {
    "padded": lambda _index: False,
    "packed": lambda _index: True,
    "mixed": lambda index: index % 2 == 0,
}
"""Which of a replica's micro-batches are packed."""


def relaid(plan: IterationPlan, layout: str, *, sequence_parallel: int = 1) -> IterationPlan:
    """The plan with its micro-batches in a layout; `sequence_parallel` ranks share the rows."""
    replicas = tuple(_relaid(plan.family, replica, LAYOUTS[layout], sequence_parallel) for replica in plan.replicas)
    return msgspec.structs.replace(plan, replicas=replicas, layouts=tuple(BatchLayout))


def _relaid(family: ModelFamily, replica: ReplicaPlan, packs: Callable[[int], bool], ranks: int) -> ReplicaPlan:
    rows = [_row(family, mb) if packs(index) else mb for index, mb in enumerate(replica.micro_batches)]

    def moved(instruction: Instruction) -> Instruction:
        shapes: tuple[TensorShape, ...] | None = getattr(instruction, "shapes", None)
        row = rows[instruction.micro_batch]
        if shapes is None or row.layout is BatchLayout.PADDED:
            return instruction
        lengths = (row.shape.input_length, row.shape.target_length)  # the encoder's state is sent first
        laid = tuple((n // ranks, 1, hidden) for n, (_, _, hidden) in zip(lengths, shapes, strict=False))
        return msgspec.structs.replace(instruction, shapes=laid)

    stages = tuple(
        msgspec.structs.replace(stage, instructions=tuple(map(moved, stage.instructions))) for stage in replica.stages
    )
    return msgspec.structs.replace(replica, micro_batches=tuple(rows), stages=stages)


def _row(family: ModelFamily, micro_batch: MicroBatch) -> MicroBatch:
    shape: Shape = packed_shape(family, micro_batch.input_lengths, micro_batch.target_lengths)
    return msgspec.structs.replace(micro_batch, layout=BatchLayout.PACKED, shape=shape)
