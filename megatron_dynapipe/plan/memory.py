"""What a stage holds in memory, by the bytes and shapes that the plan carries; verified to stay within the device's.

Beside what passes keep are messages: what is received lies in equal buffers (`runtime.messages`), for each payload as
many as the list holds at once, each as large as its largest; what is sent is held until its send is known to be
complete. An input of a micro-batch in flight is counted once, with what its forward keeps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from megatron_dynapipe.errors import PlanMemoryError
from megatron_dynapipe.plan.instructions import (
    RECEIVED_BUFFER,
    SENT_BUFFER,
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Free,
    Instruction,
    Pass,
    RecvStart,
    SendStart,
)
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan, StageEntry
from megatron_dynapipe.plan.text import point_at
from megatron_dynapipe.units import in_mb

ELEMENT_BYTES = 2
"""Of a message's element where the run's data type is not at hand: a plan does not hold it."""


def message_elements(instructions: Sequence[Instruction], *, forward_only: bool) -> list[int]:
    """Elements of messages that one stage's list holds beside what passes keep, while each of its passes runs.

    The same rule stands in `csrc/fast_verify.cpp`.
    """
    received = {Buffer.INPUT: _Received(), Buffer.OUTPUT_GRAD: _Received()}
    inputs, sent = received[Buffer.INPUT].held, dict[tuple[Buffer, int, int], int]()
    under_way: list[int] = []
    kept = 0
    for each in instructions:
        match each:
            case RecvStart():
                received[RECEIVED_BUFFER[each.payload]].take((each.micro_batch, each.chunk), _elements(each))
            case SendStart():
                sent[SENT_BUFFER[each.payload], each.micro_batch, each.chunk] = _elements(each)
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                size = 0 if forward_only else inputs.get((each.micro_batch, each.chunk), 0)
                kept -= size if isinstance(each, (Backward, BackwardInput)) else 0
                under_way.append(sum(sent.values()) - kept)
                kept += size if isinstance(each, Forward) else 0
            case Free() if each.buffer in received:
                received[each.buffer].held.pop((each.micro_batch, each.chunk), None)
            case Free():
                sent.pop((each.buffer, each.micro_batch, each.chunk), None)
    buffers = sum(kind.most * kind.largest for kind in received.values())
    return [buffers + each for each in under_way]


@dataclass(slots=True)
class _Received:
    """Messages of one payload: those that are held, the most at once, and the largest, in elements."""

    held: dict[tuple[int, int], int] = field(default_factory=dict)
    most: int = 0
    largest: int = 0

    def take(self, key: tuple[int, int], size: int) -> None:
        self.held[key] = size
        self.most, self.largest = max(self.most, len(self.held)), max(self.largest, size)


def _elements(message: RecvStart | SendStart) -> int:
    return sum(map(prod, message.shapes))


def high_water_marks(
    plan: IterationPlan, replica: ReplicaPlan, stage: int, passes: Sequence[int], messages: Sequence[int]
) -> Iterator[int]:
    """The most bytes that a stage holds while each of its passes runs, model state included.

    A backward frees what its forward kept, a divided one with its second half; a forward-only plan keeps nothing from
    pass to pass.

    Args:
        plan: of the iteration.
        replica: one of its replicas.
        stage: one of its pipeline stages.
        passes: steps of its passes, in order.
        messages: bytes of messages while each of them runs.
    """
    batches, instructions, stages = replica.micro_batches, replica.stages[stage].instructions, plan.pipeline_stages
    held = plan.model_state_bytes[stage]
    for step, under_way in zip(passes, messages, strict=True):
        each = instructions[step]
        assert isinstance(each, Pass)
        micro_batch, v = batches[each.micro_batch], each.chunk * stages + stage
        stored, peak = micro_batch.stored_bytes[v], micro_batch.peak_bytes[v]
        if isinstance(each, Forward):
            yield held + peak + under_way
            held += 0 if plan.forward_only else stored
        else:
            yield (held if not plan.peak_covers_backward else held - stored + peak) + under_way
            held -= 0 if isinstance(each, BackwardInput) else stored


def activation_peak_bytes(entry: StageEntry) -> int:
    """The most bytes that the passes of a training iteration's stage hold at a time, without model state."""
    most = held = 0
    for each in entry.stage_plan.instructions:
        if isinstance(each, Pass):
            v = each.chunk * entry.pipeline_stages + entry.stage_plan.stage
            micro_batch = entry.micro_batches[each.micro_batch]
            if isinstance(each, Forward):
                most = max(most, held + micro_batch.peak_bytes[v])
                held += micro_batch.stored_bytes[v]
            elif not isinstance(each, BackwardInput):
                held -= micro_batch.stored_bytes[v]
    return most


def peak_bytes(plan: IterationPlan, replica: ReplicaPlan, stage: int, element_bytes: int = ELEMENT_BYTES) -> int:
    """The most bytes that a stage holds at any time, model state and messages included."""
    instructions = replica.stages[stage].instructions
    passes = [step for step, each in enumerate(instructions) if isinstance(each, Pass)]
    messages = [n * element_bytes for n in message_elements(instructions, forward_only=plan.forward_only)]
    return max([plan.model_state_bytes[stage], *high_water_marks(plan, replica, stage, passes, messages)])


def check_memory(
    plan: IterationPlan,
    replica: ReplicaPlan,
    passes: Sequence[Sequence[int]],
    messages: Sequence[Sequence[int]],
) -> None:
    """Raise a PlanMemoryError where a pass's high-water mark passes the limit.

    Args:
        plan: of the iteration.
        replica: one of its replicas.
        passes: steps of every stage's passes.
        messages: bytes of messages while each of them runs.
    """
    limit, needed, first = plan.memory_limit_bytes, [0] * plan.pipeline_stages, ""
    for stage, (steps, under_way) in enumerate(zip(passes, messages, strict=True)):
        highs = high_water_marks(plan, replica, stage, steps, under_way)
        over = [(step, high, size) for step, high, size in zip(steps, highs, under_way, strict=True) if high > limit]
        if over and not first:
            most, found = in_mb(limit, over[0][1])
            where = point_at(replica.stages[stage].instructions, over[0][0])
            first = f"stage {stage}: expected at most {most}, got {found} at {where}"
        needed[stage] = max((size for _, _, size in over), default=0)
    if first:
        raise PlanMemoryError(first, needed)
