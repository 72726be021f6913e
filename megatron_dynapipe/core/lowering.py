"""From pass orders to the instruction lists that stages execute, in named passes: lists in, new lists out.

    F0 F1 B0 B1                                            pass order of a middle stage
    LOAD0 F0 FREE_DATA0 …                                  add_data        micro-batches come and go
    … F0 SEND_F0>2 …                                       add_sends       right after the pass that makes them
    … WAIT_RECV_F0<0 F0 …                                  add_recv_waits  right before the pass that needs them
    … WAIT_RECV_B0<2 WAIT_SEND_F0>2 FREE_OUTPUT0 …         add_send_waits  once the send is known to be complete
    RECV_F0<0 … WAIT_RECV_F0<0 RECV_F1<0 …                 add_recv_starts early: one per channel at a time
    … B0 FREE_INPUT0 FREE_OUTPUT_GRAD0 …                   add_frees       what was received

A channel (`core.instructions.Channel`) between two stages is a FIFO: both ends issue its transfers in the sender's
order. A receiver that needs a later message first therefore waits for the earlier ones before it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dynapipe.core.instructions import (
    EFFECTS,
    MADE,
    RECEIVED_BUFFER,
    SENT_BUFFER,
    USED_UP,
    Buffer,
    Forward,
    Free,
    Instruction,
    Load,
    Pass,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    effects_of,
)
from megatron_dynapipe.core.model import BoundaryShapes
from megatron_dynapipe.core.native import PassOrder, agree

Lists = tuple[tuple[Instruction, ...], ...]
"""Instructions per pipeline stage."""

_SENDS = {
    kind: [payload for payload, buffer in SENT_BUFFER.items() if effect.buffers.get(buffer) == MADE]
    for kind, effect in EFFECTS.items()
}
"""The payloads that an instruction makes."""
_RECEIVES = {
    kind: [payload for payload, buffer in RECEIVED_BUFFER.items() if buffer in effect.buffers]
    for kind, effect in EFFECTS.items()
}
"""The payloads that an instruction needs."""

_Message = tuple[Payload, int, int]
"""(payload, micro-batch, chunk) as one stage names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTopology:
    """What lowering knows of a replica's pipeline, in addition to the order of passes."""

    stages: int
    chunks: int
    shapes: BoundaryShapes
    forward_only: bool = False
    receive_ahead: int | None = None
    """Passes that may run between a receive's start and its wait; None for as many as one receive at a time allows."""

    def __post_init__(self) -> None:
        assert self.stages > 1 or self.chunks == 1, "one stage has no use for several chunks"

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.stages * self.chunks - 1


def lower(order: PassOrder, topology: PipelineTopology) -> Lists:
    """The instruction lists of all stages for a pass order that does not stall."""
    lists: Lists = order
    lists = add_data(lists)
    lists = add_sends(lists, topology)
    lists = add_recv_waits(lists, topology)
    lists = add_send_waits(lists, topology)
    lists = add_recv_starts(lists, topology.receive_ahead)
    return add_frees(lists, topology)


def add_data(lists: Lists) -> Lists:
    """Load each micro-batch before its first pass on a stage; drop it after its last forward there."""
    return tuple(tuple(_with_data(instructions)) for instructions in lists)


def _with_data(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    needs_data = [step for step, i in enumerate(instructions) if Buffer.DATA in EFFECTS[type(i)].buffers]
    last = {instructions[step].micro_batch: step for step in needs_data}
    loaded: set[int] = set()
    for step, instruction in enumerate(instructions):
        row = instruction.micro_batch
        if row not in loaded:
            loaded.add(row)
            yield Load(row)
        yield instruction
        if last[row] == step:
            yield Free(Buffer.DATA, row)


def add_sends(lists: Lists, topology: PipelineTopology) -> Lists:
    """Start sending a pass's result right after the pass."""
    return tuple(tuple(_with_sends(stage, instructions, topology)) for stage, instructions in enumerate(lists))


def _with_sends(stage: int, instructions: Sequence[Instruction], topology: PipelineTopology) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        for payload in _SENDS[type(instruction)]:
            assert isinstance(instruction, Pass)
            row = instruction.micro_batch
            chunk = instruction.chunk
            onwards = 1 if payload is Payload.ACTIVATION else -1
            v = chunk * topology.stages + stage
            if 0 <= v + onwards <= topology.last:
                shapes = topology.shapes[row][min(v, v + onwards)]
                yield SendStart(payload, row, chunk, (stage + onwards) % topology.stages, shapes)


def add_recv_waits(lists: Lists, topology: PipelineTopology) -> Lists:
    """Wait for a pass's input right before the pass, after whatever its channel carries before it."""
    arrivals = _arrivals(lists)
    return tuple(tuple(_with_recv_waits(stage, lists[stage], arrivals[stage], topology)) for stage in range(len(lists)))


_Received = dict[Payload, list[RecvStart]]
"""A stage's messages, in the order in which they are sent. A stage receives each payload from one peer only."""


def _arrivals(lists: Lists) -> list[_Received]:
    received: list[_Received] = [{payload: [] for payload in Payload} for _ in lists]
    for stage, instructions in enumerate(lists):
        for send in instructions:
            if isinstance(send, SendStart):
                payload, row, chunk = _received_as(stage, send)
                received[send.peer][payload].append(RecvStart(payload, row, chunk, stage, send.shapes))
    return received


def _with_recv_waits(
    stage: int, instructions: Sequence[Instruction], received: _Received, topology: PipelineTopology
) -> Iterator[Instruction]:
    queues = {payload: iter(queue) for payload, queue in received.items()}
    waited: set[_Message] = set()
    for instruction in instructions:
        for payload in _RECEIVES[type(instruction)]:
            assert isinstance(instruction, Pass)
            if _begins(stage, instruction.chunk, payload, topology):
                continue
            needed = (payload, instruction.micro_batch, instruction.chunk)
            while needed not in waited:
                start = next(queues[payload])
                waited.add((payload, start.micro_batch, start.chunk))
                yield start
                yield RecvWait(payload, start.micro_batch, start.chunk, start.peer)
        yield instruction


def _begins(stage: int, chunk: int, payload: Payload, topology: PipelineTopology) -> bool:
    """Whether a payload's way through the model begins at a virtual stage, which so receives none."""
    return chunk * topology.stages + stage == (0 if payload is Payload.ACTIVATION else topology.last)


SENT_AHEAD = 4
"""Forwards that a stage of a forward-only plan runs before it waits for a send. At 4 none of the public batches is
predicted to take longer than with no wait; at 2, up to 5%."""
agree("Lowering", {"SENT_AHEAD": SENT_AHEAD})


def add_send_waits(lists: Lists, topology: PipelineTopology) -> Lists:
    """Wait for each send, and drop what it sent, where the wait cannot hold up the stage.

        sender    SEND_F0>1 … WAIT_RECV_B0<1  WAIT_SEND_F0>1 FREE_OUTPUT0
        receiver  … WAIT_RECV_F0<0 … SEND_B0>0

    The receiver had received the message before it sent what the sender has by then received.

    Nothing answers the sends of a forward-only plan. There a stage waits for each a few forwards later:

        sender    F0 SEND_F0>1 F1 SEND_F1>1 … WAIT_SEND_F0>1 FREE_OUTPUT0 F4

    If all stages run forwards in one sequence, this ends: the receiver starts to receive a message once it is about to
    run the forward before it, so that a wait depends on earlier places of the sequence alone. A message that crosses
    the ring's end is needed at a later place; sends of such messages, like others that nothing answers, are waited for
    at the list's end.
    """
    ends = tuple(tuple(i for i in instructions if isinstance(i, _ENDS)) for instructions in lists)
    plans = [_answered_sends(stage, ends) for stage in range(len(lists))]
    if topology.forward_only:
        sequences = {tuple(i for i in instructions if isinstance(i, Forward)) for instructions in lists}
        if len(sequences) == 1:
            plans = [_paced(stage, plan, *sequences) for stage, plan in enumerate(plans)]
    return tuple(tuple(_with_send_waits(lists[stage], plans[stage])) for stage in range(len(lists)))


_ENDS = (SendStart, RecvWait)
"""The ends of a transfer that order what comes before them on one stage and after them on the other."""


_Completed = dict[_Message | Forward | None, list[SendStart]]
"""Sends to wait for once a message is received, or before a forward; under None, at the list's end."""


def _paced(stage: int, completed: _Completed, sequence: Sequence[Forward]) -> _Completed:
    """Wait for sends to the next stage a few forwards after their own."""
    number = {(step.micro_batch, step.chunk): place for place, step in enumerate(sequence)}
    paced: _Completed = defaultdict(list)
    for point, sends in completed.items():
        for send in sends:
            later = number[send.micro_batch, send.chunk] + SENT_AHEAD
            onwards = send.peer == stage + 1 and later < len(sequence)
            paced[sequence[later] if onwards else point].append(send)
    return paced


def _answered_sends(stage: int, ends: Lists) -> _Completed:
    """For each message the stage receives, the sends known to be complete with it; under None, the unanswered ones."""
    answered: _Completed = defaultdict(list)
    sends: dict[int, list[SendStart]] = defaultdict(list)
    for instruction in ends[stage]:
        if isinstance(instruction, SendStart):
            sends[instruction.peer].append(instruction)
    for peer, started in sends.items():
        answers = _answers(stage, peer, ends)
        for send in started:
            answered[answers.get(_received_as(stage, send))].append(send)
    return answered


def _received_as(stage: int, send: SendStart) -> _Message:
    """The message's name on its receiver: past the ring's end, the chunk is another."""
    step = 1 if send.payload is Payload.ACTIVATION else -1
    return send.payload, send.micro_batch, send.chunk + step * (stage + step != send.peer)


def _answers(stage: int, peer: int, ends: Lists) -> dict[_Message, _Message]:
    """For each message `peer` waits for from `stage`, the next that it sends back which `stage` waits for first."""
    position = {
        (i.payload, i.micro_batch, i.chunk): step
        for step, i in enumerate(ends[stage])
        if isinstance(i, RecvWait) and i.peer == peer
    }
    answers: dict[_Message, _Message] = {}
    earliest: _Message | None = None
    for instruction in reversed(ends[peer]):
        if isinstance(instruction, SendStart) and instruction.peer == stage:
            name = _received_as(peer, instruction)
            if earliest is None or position[name] < position[earliest]:
                earliest = name
        elif isinstance(instruction, RecvWait) and instruction.peer == stage and earliest is not None:
            answers[instruction.payload, instruction.micro_batch, instruction.chunk] = earliest
    return answers


def _with_send_waits(instructions: Sequence[Instruction], completed: _Completed) -> Iterator[Instruction]:
    for instruction in instructions:
        if isinstance(instruction, Forward):
            for send in completed.get(instruction, ()):
                yield from _complete(send)
        yield instruction
        if isinstance(instruction, RecvWait):
            key = (instruction.payload, instruction.micro_batch, instruction.chunk)
            for send in completed.get(key, ()):
                yield from _complete(send)
    for send in completed.get(None, ()):
        yield from _complete(send)


def _complete(send: SendStart) -> Iterator[Instruction]:
    yield SendWait(send.payload, send.micro_batch, send.chunk, send.peer)
    yield Free(SENT_BUFFER[send.payload], send.micro_batch, send.chunk)


def add_recv_starts(lists: Lists, ahead: int | None = None) -> Lists:
    """Start each receive as early as at most one unmatched receive per channel allows: after the one before.

        None   RECV_F1 … WAIT_RECV_F1 RECV_F2 F1 SEND_F1 …
        1      F0 SEND_F0 WAIT_RECV_B0 RECV_F1 B0 … WAIT_RECV_F1 F1
        0      … B0 SEND_B0 RECV_F1 WAIT_RECV_F1 F1

    Args:
        lists: with each receive's start right before its wait.
        ahead: most passes that may run between the two.
    """
    if ahead is None:
        return tuple(_hoist_recv_starts(instructions) for instructions in lists)
    return tuple(_start_receives_before_passes(instructions, ahead) for instructions in lists) if ahead else lists


def _start_receives_before_passes(instructions: Sequence[Instruction], ahead: int) -> tuple[Instruction, ...]:
    """Move each receive's start before the pass `ahead` places earlier, but not past the channel's previous wait."""
    moved: list[Instruction] = []
    passes: list[int] = []  # places of the passes in `moved`
    waited: dict[Payload, int] = {}  # place of each channel's latest wait
    for instruction in instructions:
        if not isinstance(instruction, RecvStart):
            if isinstance(instruction, Pass):
                passes.append(len(moved))
            elif isinstance(instruction, RecvWait):
                waited[instruction.payload] = len(moved)
            moved.append(instruction)
            continue
        allowed = [place for place in passes[-ahead:] if place > waited.get(instruction.payload, -1)]
        place = allowed[0] if allowed else len(moved)
        moved.insert(place, instruction)
        passes = [at + (at >= place) for at in passes]
        waited = {payload: at + (at >= place) for payload, at in waited.items()}
    return tuple(moved)


def _hoist_recv_starts(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    starts: dict[Payload, list[RecvStart]] = {payload: [] for payload in Payload}
    for instruction in instructions:
        if isinstance(instruction, RecvStart):
            starts[instruction.payload].append(instruction)
    queues = {payload: iter(queue) for payload, queue in starts.items()}
    hoisted: list[Instruction] = [first for queue in queues.values() if (first := next(queue, None))]
    for instruction in instructions:
        if isinstance(instruction, RecvStart):
            continue
        hoisted.append(instruction)
        if isinstance(instruction, RecvWait) and (start := next(queues[instruction.payload], None)):
            hoisted.append(start)
    return tuple(hoisted)


def add_frees(lists: Lists, topology: PipelineTopology) -> Lists:
    """Drop what was received once it has been used: after the backward, or the forward of a forward-only plan."""
    return tuple(tuple(_with_frees(stage, instructions, topology)) for stage, instructions in enumerate(lists))


def _with_frees(stage: int, instructions: Sequence[Instruction], topology: PipelineTopology) -> Iterator[Instruction]:
    effects = effects_of(forward_only=topology.forward_only)
    used_up = {
        kind: [payload for payload, buffer in RECEIVED_BUFFER.items() if effect.buffers.get(buffer) == USED_UP]
        for kind, effect in effects.items()
    }
    for instruction in instructions:
        yield instruction
        for payload in used_up[type(instruction)]:
            assert isinstance(instruction, Pass)
            if not _begins(stage, instruction.chunk, payload, topology):
                yield Free(RECEIVED_BUFFER[payload], instruction.micro_batch, instruction.chunk)
