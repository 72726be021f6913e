"""Instruction lists for micro-batches whose shapes are known only now.

passes (of a plan, or 1F1B) ──lower, once──► list without shapes ──fill, per iteration──► this rank's list
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_dynapipe.modules.boundary import Boundary, Layout
from megatron_dynapipe.plan.instructions import Instruction, Payload, RecvStart, SendStart
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.planning.lowering import Topology, lower
from megatron_dynapipe.planning.problem import ScheduleProblem
from megatron_dynapipe.planning.schedules import SCHEDULES

_NO_LIMIT = 2**60


@lru_cache(maxsize=256)
def lists_without_shapes(
    stages: int, chunks: int, micro_batches: int, schedule: str, *, forward_only: bool
) -> tuple[tuple[Instruction, ...], ...]:
    """The lists of all ranks under a schedule, every pass taken to be as long as any other."""
    virtual = stages * chunks
    ones, zeros = (np.full((micro_batches, virtual), value, np.int64) for value in (1, 0))
    problem = ScheduleProblem(
        stages=stages,
        chunks=chunks,
        forward_ns=ones,
        backward_ns=2 * ones,
        stored_bytes=zeros,
        peak_bytes=zeros,
        forward_transfer_ns=zeros,
        backward_transfer_ns=zeros,
        model_state_bytes=np.zeros(stages, np.int64),
        memory_limit_bytes=_NO_LIMIT,
        forward_only=forward_only,
    )
    nothing = (((),) * (virtual - 1),) * micro_batches
    topology = Topology(stages=stages, chunks=chunks, shapes=nothing, forward_only=forward_only)
    return lower(SCHEDULES[schedule](problem), topology)


def fill(instructions: Sequence[Instruction], layouts: Sequence[Layout], *, stage: int, stages: int) -> StagePlan:
    """One rank's list with the shapes of these micro-batches.

    Args:
        instructions: of the rank; shapes in it are not looked at.
        layouts: of the micro-batches.
        stage: of the rank.
        stages: ranks of the pipeline.
    """
    filled = [
        type(each)(
            each.payload, each.micro_batch, each.chunk, each.peer, shapes_of(each, layouts, stage=stage, stages=stages)
        )
        if isinstance(each, SendStart | RecvStart)
        else each
        for each in instructions
    ]
    return StagePlan(stage=stage, instructions=tuple(filled), predicted=())


def shapes_of(
    transfer: SendStart | RecvStart, layouts: Sequence[Layout], *, stage: int, stages: int
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors of a transfer."""
    boundary = boundary_of(transfer, layouts, stage=stage, stages=stages)
    return boundary.shapes if transfer.payload is Payload.ACTIVATION else boundary.gradient_shapes


def boundary_of(transfer: SendStart | RecvStart, layouts: Sequence[Layout], *, stage: int, stages: int) -> Boundary:
    """The boundary that a transfer crosses."""
    virtual = transfer.chunk * stages + stage
    downstream = (transfer.payload is Payload.ACTIVATION) == isinstance(transfer, SendStart)
    return layouts[transfer.micro_batch].boundaries[virtual if downstream else virtual - 1]
