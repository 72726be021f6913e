"""Memory that a stage holds, by the bytes and shapes that the plan carries; verified to stay within the device's.

Messages take memory in addition to what passes keep. They lie in pools of equal buffers (`runtime.messages`): received
activations, received gradients, and what is sent, until its send is known to be complete. A pool has as many buffers as
the list has held at once so far, each as large as the largest message that the list puts there. An input of a
micro-batch in flight is counted once, with what its forward keeps.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import (
    EFFECTS,
    MADE,
    POOLS,
    Buffer,
    Free,
    Instruction,
    Pass,
    RecvStart,
    SendStart,
    Work,
    buffer_of,
    effects_of,
    point_at,
)
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan
from megatron_dynapipe.core.units import in_mb

ELEMENT_BYTES = 2
"""Bytes of a message's element if the run's data type is not at hand: a plan does not hold it."""


def message_elements(instructions: Sequence[Instruction], *, forward_only: bool) -> list[int]:
    """Elements of messages that one stage's list holds while each of its passes runs, in addition to what passes keep.

    The same rule stands in `csrc/verify/fast_verify.cpp`, and for orders of passes in `csrc/costs/memory.cpp`.
    """
    largest: dict[Buffer, int] = defaultdict(int)
    sizes: dict[tuple[Buffer, int, int], int] = {}
    for step in instructions:
        if isinstance(step, (RecvStart, SendStart)):
            buffer = buffer_of(step)
            size = sum(map(prod, step.shapes))
            sizes[buffer, step.micro_batch, step.chunk] = size
            largest[POOLS[buffer]] = max(largest[POOLS[buffer]], size)
    used = defaultdict[Buffer, int](int)
    most = defaultdict[Buffer, int](int)
    under_way: list[int] = []
    kept = 0
    for step in instructions:
        match step:
            case RecvStart() | SendStart():
                pool = POOLS[buffer_of(step)]
                used[pool] += 1
                most[pool] = max(most[pool], used[pool])
            case Free() if step.buffer in POOLS:
                used[POOLS[step.buffer]] -= 1
            case _ if isinstance(step, Pass):
                effect = EFFECTS[type(step)]
                size = 0 if forward_only else sizes.get((Buffer.INPUT, step.micro_batch, step.chunk), 0)
                if effect.work is Work.BACKWARD:
                    kept -= size
                under_way.append(sum(most[pool] * largest[pool] for pool in most) - kept)
                if effect.graph == MADE:
                    kept += size
    return under_way


def high_water_marks(
    plan: IterationPlan, replica: ReplicaPlan, stage: int, passes: Sequence[int], messages: Sequence[int]
) -> Iterator[int]:
    """The most bytes that a stage holds while each of its passes runs, model state included.

    A backward frees what its forward kept, a divided one with its second half; a forward-only plan keeps nothing from
    pass to pass.

    Args:
        plan: the iteration's.
        replica: one of its replicas.
        stage: one of its pipeline stages.
        passes: steps of its passes, in order.
        messages: bytes of messages while each of them runs.
    """
    batches = replica.micro_batches
    instructions = replica.stages[stage].instructions
    stages = plan.pipeline_stages
    effects = effects_of(forward_only=plan.forward_only)
    bytes_held = plan.model_state_bytes[stage]
    for step, under_way in zip(passes, messages, strict=True):
        instruction = instructions[step]
        assert isinstance(instruction, Pass)
        micro_batch = batches[instruction.micro_batch]
        v = instruction.chunk * stages + stage
        stored = micro_batch.stored_bytes[v]
        peak = micro_batch.peak_bytes[v]
        effect = effects[type(instruction)]
        if effect.work is Work.FORWARD:
            yield bytes_held + peak + under_way
        else:
            yield (bytes_held if not plan.peak_covers_backward else bytes_held - stored + peak) + under_way
        bytes_held += stored * effect.graphs_kept


def peak_bytes(plan: IterationPlan, replica: ReplicaPlan, stage: int, element_bytes: int = ELEMENT_BYTES) -> int:
    """The most bytes that a stage holds at any time, model state and messages included."""
    instructions = replica.stages[stage].instructions
    passes = [step for step, instruction in enumerate(instructions) if isinstance(instruction, Pass)]
    messages = [n * element_bytes for n in message_elements(instructions, forward_only=plan.forward_only)]
    return max([plan.model_state_bytes[stage], *high_water_marks(plan, replica, stage, passes, messages)])


def check_memory(
    plan: IterationPlan,
    replica: ReplicaPlan,
    passes: Sequence[Sequence[int]],
    messages: Sequence[Sequence[int]],
) -> None:
    """Raise a PlanError where a pass's high-water mark passes the limit.

    Args:
        plan: the iteration's.
        replica: one of its replicas.
        passes: steps of every stage's passes.
        messages: bytes of messages while each of them runs.
    """
    limit = plan.memory_limit_bytes
    for stage, (steps, under_way) in enumerate(zip(passes, messages, strict=True)):
        for step, high in zip(steps, high_water_marks(plan, replica, stage, steps, under_way), strict=True):
            if high > limit:
                most, needed = in_mb(limit, high)
                where = point_at(replica.stages[stage].instructions, step)
                raise PlanError(f"stage {stage}: expected at most {most}, got {needed} at {where}")
