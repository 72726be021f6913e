"""Plans changed by hand: the same micro-batches, some as packed rows, some with backward passes in halves; or teams,
some one after another."""

from collections.abc import Callable, Sequence

import msgspec

from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Instruction, Pass, TensorShape
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan, StagePlan
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute, Shape, round_up
from tests.helpers.lists import packed_shape

LAYOUTS: dict[str, Callable[[int], bool]] = {
    "padded": lambda _index: False,
    "packed": lambda _index: True,
    "mixed": lambda index: index % 2 == 0,
}
"""Which of a replica's micro-batches are packed."""


def relaid(plan: IterationPlan, layout: str, *, sequence_parallel: int = 1) -> IterationPlan:
    """The plan with its micro-batches in a layout; `sequence_parallel` ranks share the rows."""
    replicas = tuple(_relaid(plan.family, replica, LAYOUTS[layout], sequence_parallel) for replica in plan.replicas)
    return msgspec.structs.replace(plan, replicas=replicas, batch_layouts=tuple(BatchLayout))


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


def teamed(plan: IterationPlan, sizes: Sequence[int], *, sequence_parallel: int = 1) -> IterationPlan:
    """The plan with a team of each size in place of a replica; `sequence_parallel` ranks share the rows."""
    replicas = []
    for replica, size in zip(plan.replicas, sizes, strict=True):
        rows = [_shared(plan.family, mb, size) for mb in replica.micro_batches]
        lengths = [row.shape.input_length // sequence_parallel for row in rows]
        stages = tuple(
            msgspec.structs.replace(
                stage, instructions=tuple(_of_length(step, lengths[step.micro_batch]) for step in stage.instructions)
            )
            for stage in replica.stages
        )
        for place in range(size):
            its = tuple(msgspec.structs.replace(row, share=(size, place)) for row in rows)
            replicas.append(msgspec.structs.replace(replica, micro_batches=its, stages=stages))
    return msgspec.structs.replace(plan, replicas=tuple(replicas))


def followed(plan: IterationPlan, later: IterationPlan) -> IterationPlan:
    """The plan whose replicas run what they do in the first one, and then what they do in the second one."""
    replicas = []
    for first, then in zip(plan.replicas, later.replicas, strict=True):
        stages = []
        for its, more in zip(first.stages, then.stages, strict=True):
            moved = (_moved(step, len(first.micro_batches)) for step in more.instructions)
            stages.append(msgspec.structs.replace(its, instructions=(*its.instructions, *moved), predicted=()))
        rows = (*first.micro_batches, *then.micro_batches)
        replicas.append(msgspec.structs.replace(first, micro_batches=rows, stages=tuple(stages)))
    return msgspec.structs.replace(plan, replicas=tuple(replicas))


def _moved(step: Instruction, rows: int) -> Instruction:
    return msgspec.structs.replace(step, micro_batch=step.micro_batch + rows)


def _shared(family: ModelFamily, micro_batch: MicroBatch, size: int) -> MicroBatch:
    """A share of it at the first place, in the least shape."""
    shared = msgspec.structs.replace(micro_batch, share=(size, 0))
    lengths = shared.positions(family)
    length = sum(lengths) if micro_batch.layout is BatchLayout.PACKED else max(lengths)
    shape = Shape(micro_batch.shape.size, round_up(length))
    return shared if size == 1 else msgspec.structs.replace(shared, shape=shape)


def _of_length(step: Instruction, length: int) -> Instruction:
    shapes: tuple[TensorShape, ...] | None = getattr(step, "shapes", None)
    if shapes is None:
        return step
    return msgspec.structs.replace(step, shapes=tuple((length, *rest) for _, *rest in shapes))


def halved(plan: IterationPlan, *, every: int) -> IterationPlan:
    """The plan with the backward passes of every n-th micro-batch in halves, but for those recomputed in full.

    Second halves run after the two passes that follow, so that they take another order than the first ones.
    """

    def of(replica: ReplicaPlan, stage: StagePlan) -> StagePlan:
        def may_halve(step: Pass) -> bool:
            modes = replica.micro_batches[step.micro_batch].recompute
            return modes[step.chunk * plan.pipeline_stages + stage.stage] is not Recompute.FULL

        steps: list[Instruction] = []
        waiting: list[BackwardWeight] = []
        for step in stage.instructions:
            if isinstance(step, Pass) and len(waiting) > 2:
                steps += [waiting.pop(), waiting.pop(0)]
            if isinstance(step, Backward) and step.micro_batch % every == 0 and may_halve(step):
                waiting.append(BackwardWeight(step.micro_batch, step.chunk))
                step = BackwardInput(step.micro_batch, step.chunk)
            steps.append(step)
        return msgspec.structs.replace(stage, instructions=(*steps, *waiting), predicted=())

    replicas = (
        msgspec.structs.replace(replica, stages=tuple(of(replica, stage) for stage in replica.stages))
        for replica in plan.replicas
    )
    return msgspec.structs.replace(plan, replicas=tuple(replicas))


def _row(family: ModelFamily, micro_batch: MicroBatch) -> MicroBatch:
    shape: Shape = packed_shape(family, micro_batch.input_lengths, micro_batch.target_lengths)
    return msgspec.structs.replace(micro_batch, layout=BatchLayout.PACKED, shape=shape)
