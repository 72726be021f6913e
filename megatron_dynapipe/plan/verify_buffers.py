"""Verify: one rank's list, on its own. Every buffer of every micro-batch goes through its states once, in order.

    DATA                   absent ─LOAD─► ready ───────────── every chunk's F ───────────────► used ─FREE─► freed
    INPUT, OUTPUT_GRAD     absent ─RECV─► moving ─WAIT_RECV─► ready ─ B (forward-only: F) ───► used ─FREE─► freed
    OUTPUT, INPUT_GRAD     absent ─F, B─► ready ─SEND─► moving ─WAIT_SEND────────────────────► used ─FREE─► freed
    the passes themselves  absent ─F─► ready ─B─► freed, or ready ─BI─► used ─BW─► freed; BI is B to all buffers

Since each instruction is allowed in one state only and every buffer must end freed, a list that passes has every
pass, transfer and free exactly once, in an order that never uses what is not there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from megatron_dynapipe.errors import PlanError
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
    Load,
    Pass,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    TensorShape,
)
from megatron_dynapipe.plan.text import format_instruction, point_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The dimensions a replica's lists are checked against."""

    stages: int
    chunks: int
    micro_batches: int
    forward_only: bool
    ordered_starts: bool = False
    """A send's start waits for its channel's previous message."""


class TransferEnd(msgspec.Struct, frozen=True, gc=False):
    """One end of a transfer: which tensors, and where its start stands."""

    micro_batch: int
    boundary: int
    """The boundary v → v + 1 between virtual stages that the tensors cross, either way: v."""
    shapes: tuple[TensorShape, ...]
    step: int


class Wait(msgspec.Struct, frozen=True, gc=False):
    """A point of the list that blocks: until the peer has started the other end of transfer `number`."""

    step: int
    payload: Payload
    sending: bool
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTrace:
    """The passes and transfers of one rank's list, in order."""

    stage: int
    instructions: Sequence[Instruction]
    passes: list[int] = field(default_factory=list)
    """Steps."""
    sends: dict[Payload, list[TransferEnd]] = field(default_factory=lambda: {payload: [] for payload in Payload})
    receives: dict[Payload, list[TransferEnd]] = field(default_factory=lambda: {payload: [] for payload in Payload})
    waits: list[Wait] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Where the passes and the starts of sends stand in each rank's list, of lists that can run.

    Attributes:
        messages: elements of messages that are held while each pass runs (`plan.memory`).
    """

    passes: list[list[int]]
    sends: list[list[int]]
    messages: list[list[int]]


class State(IntEnum):
    """The state of a buffer."""

    NONE = 0
    """The stage never has this buffer: no INPUT at the model's start, no OUTPUT at its end, no gradients forward."""
    ABSENT = 1
    READY = 2
    MOVING = 3
    USED = 4
    FREED = 5


# A plan has thousands of steps, and reading an enum's member costs as much as the rest of a step's check.
NONE, ABSENT, READY, MOVING, USED, FREED = map(int, State)
_ACTIVATION, _GRADIENT = Payload.ACTIVATION, Payload.GRADIENT


def trace_stage(dimensions: Dimensions, stage: int, instructions: Sequence[Instruction]) -> StageTrace:
    """Walk one rank's list.

    Raises:
        PlanError: an instruction stands where it cannot run, or the list ends with work or buffers left.
    """
    walk = _Walk(dimensions, StageTrace(stage=stage, instructions=instructions))
    handlers = walk.handlers()
    step = -1
    try:
        for step, instruction in enumerate(instructions):
            if not 0 <= instruction.micro_batch < dimensions.micro_batches:
                raise PlanError(f"there are {dimensions.micro_batches} micro-batches")
            handlers[type(instruction)](step, instruction)
    except PlanError as error:
        raise PlanError(f"stage {stage}, step {step}: {error.message}, at {point_at(instructions, step)}") from None
    walk.check_end()
    return walk.trace


class _Walk:
    """States of all buffers of one rank while its list is walked."""

    def __init__(self, dimensions: Dimensions, trace: StageTrace) -> None:
        self.dimensions, self.trace, self.chunks = dimensions, trace, dimensions.chunks
        self.first = trace.stage == 0
        self.last = trace.stage == dimensions.stages - 1
        rows, chunks = dimensions.micro_batches, dimensions.chunks
        full = [ABSENT] * chunks
        backward = [NONE if dimensions.forward_only else ABSENT] * chunks
        not_first = [NONE, *full[1:]] if self.first else full
        not_last = [*full[1:], NONE] if self.last else full
        self.data = [ABSENT] * rows
        self.forwards_left = [chunks] * rows
        self.done = full * rows
        self.buffers: dict[Buffer, list[int]] = {
            Buffer.INPUT: not_first * rows,
            Buffer.OUTPUT: not_last * rows,
            Buffer.OUTPUT_GRAD: list(map(min, not_last, backward)) * rows,
            Buffer.INPUT_GRAD: list(map(min, not_first, backward)) * rows,
        }
        following, previous = (trace.stage + 1) % dimensions.stages, (trace.stage - 1) % dimensions.stages
        self.receiver = {_ACTIVATION: following, _GRADIENT: previous}
        self.sender = {_ACTIVATION: previous, _GRADIENT: following}
        self.sent: dict[Payload, dict[int, int]] = {payload: {} for payload in Payload}
        self.receiving: set[Payload] = set()

    def handlers(self) -> dict[type[Instruction], Callable[..., None]]:
        """The method for each kind of instruction."""
        return {
            Load: self.load,
            Forward: self.forward,
            Backward: self.backward,
            BackwardInput: self.backward,
            BackwardWeight: self.backward_weight,
            SendStart: self.send_start,
            SendWait: self.send_wait,
            RecvStart: self.recv_start,
            RecvWait: self.recv_wait,
            Free: self.free,
        }

    def load(self, step: int, load: Load) -> None:
        if self.data[load.micro_batch] != ABSENT:
            raise PlanError(f"micro-batch {load.micro_batch} is loaded twice")
        self.data[load.micro_batch] = READY

    def forward(self, step: int, run: Forward) -> None:
        key, row = self.key(run.micro_batch, run.chunk), run.micro_batch
        if self.data[row] != READY:
            raise PlanError(f"DATA of micro-batch {row} is {State(self.data[row]).name}, expected READY")
        if self.done[key] != ABSENT:
            raise PlanError("the forward pass runs twice")
        self.done[key] = READY
        if self.buffers[Buffer.INPUT][key] != NONE:
            self.advance(Buffer.INPUT, row, run.chunk, READY, USED if self.dimensions.forward_only else READY)
        if self.buffers[Buffer.OUTPUT][key] != NONE:
            self.advance(Buffer.OUTPUT, row, run.chunk, ABSENT, READY)
        self.forwards_left[row] -= 1
        self.trace.passes.append(step)

    def backward(self, step: int, run: Backward | BackwardInput) -> None:
        key = self.key(run.micro_batch, run.chunk)
        if self.dimensions.forward_only:
            raise PlanError("a forward-only plan has no backward passes")
        if self.done[key] != READY:
            raise PlanError("the backward pass runs " + ("before the forward" if self.done[key] == ABSENT else "twice"))
        self.done[key] = USED if isinstance(run, BackwardInput) else FREED
        for buffer, before, after in (
            (Buffer.OUTPUT_GRAD, READY, USED),
            (Buffer.INPUT, READY, USED),
            (Buffer.INPUT_GRAD, ABSENT, READY),
        ):
            if self.buffers[buffer][key] != NONE:
                self.advance(buffer, run.micro_batch, run.chunk, before, after)
        self.trace.passes.append(step)

    def backward_weight(self, step: int, run: BackwardWeight) -> None:
        key = self.key(run.micro_batch, run.chunk)
        if self.done[key] != USED:
            before = "twice" if self.done[key] == FREED else "before that of the inputs' gradients"
            raise PlanError(f"the half of the weights' gradients runs {before}")
        self.done[key] = FREED
        self.trace.passes.append(step)

    def send_start(self, step: int, send: SendStart) -> None:
        payload = send.payload
        if send.peer != self.receiver[payload]:
            raise PlanError(f"expected stage {self.receiver[payload]} as peer")
        key = self.advance(SENT_BUFFER[payload], send.micro_batch, send.chunk, READY, MOVING)
        boundary = send.chunk * self.dimensions.stages + self.trace.stage - (payload is _GRADIENT)
        sends = self.trace.sends[payload]
        if self.dimensions.ordered_starts and sends:
            self.trace.waits.append(Wait(step, payload, True, len(sends) - 1))
        self.sent[payload][key] = len(sends)
        sends.append(TransferEnd(send.micro_batch, boundary, send.shapes, step))

    def send_wait(self, step: int, wait: SendWait) -> None:
        payload = wait.payload
        if wait.peer != self.receiver[payload]:
            raise PlanError(f"expected stage {self.receiver[payload]} as peer")
        key = self.advance(SENT_BUFFER[payload], wait.micro_batch, wait.chunk, MOVING, USED)
        self.trace.waits.append(Wait(step, payload, True, self.sent[payload][key]))

    def recv_start(self, step: int, receive: RecvStart) -> None:
        payload = receive.payload
        if receive.peer != self.sender[payload]:
            raise PlanError(f"expected stage {self.sender[payload]} as peer")
        if payload in self.receiving:
            raise PlanError("the channel has a receive already that has not been waited for")
        self.advance(RECEIVED_BUFFER[payload], receive.micro_batch, receive.chunk, ABSENT, MOVING)
        self.receiving.add(payload)
        boundary = receive.chunk * self.dimensions.stages + self.trace.stage - (payload is _ACTIVATION)
        self.trace.receives[payload].append(TransferEnd(receive.micro_batch, boundary, receive.shapes, step))

    def recv_wait(self, step: int, wait: RecvWait) -> None:
        payload = wait.payload
        if wait.peer != self.sender[payload]:
            raise PlanError(f"expected stage {self.sender[payload]} as peer")
        self.advance(RECEIVED_BUFFER[payload], wait.micro_batch, wait.chunk, MOVING, READY)
        self.receiving.discard(payload)
        self.trace.waits.append(Wait(step, payload, False, len(self.trace.receives[payload]) - 1))

    def free(self, step: int, free: Free) -> None:
        row = free.micro_batch
        if free.buffer is not Buffer.DATA:
            self.advance(free.buffer, row, free.chunk, USED, FREED)
        elif free.chunk != 0 or self.data[row] != READY or self.forwards_left[row]:
            raise PlanError(
                f"DATA of micro-batch {row} is {State(self.data[row]).name} with {self.forwards_left[row]} forward "
                "passes left, expected READY with none left"
            )
        else:
            self.data[row] = FREED

    def key(self, micro_batch: int, chunk: int) -> int:
        """Index of a micro-batch's state on a chunk."""
        if not 0 <= chunk < self.chunks:
            raise PlanError(f"the stage has {self.chunks} chunks")
        return micro_batch * self.chunks + chunk

    def advance(self, buffer: Buffer, micro_batch: int, chunk: int, before: int, after: int) -> int:
        """Move a buffer from one state to the next, and from no other; its index."""
        if not 0 <= chunk < self.chunks:
            raise PlanError(f"the stage has {self.chunks} chunks")
        key = micro_batch * self.chunks + chunk
        states = self.buffers[buffer]
        if states[key] != before:
            raise PlanError(f"{buffer.name} is {State(states[key]).name}, expected {State(before).name}")
        states[key] = after
        return key

    def check_end(self) -> None:
        """All passes run, all buffers freed."""
        for row, state in enumerate(self.data):
            if state != FREED:
                raise self.leftover(f"DATA of micro-batch {row}", state)
        run = READY if self.dimensions.forward_only else FREED
        chunks = self.dimensions.chunks
        for key, state in enumerate(self.done):
            if state != run:
                kinds: dict[int, type[Pass]] = {ABSENT: Forward, USED: BackwardWeight}
                word = format_instruction(kinds.get(state, Backward)(key // chunks, key % chunks))
                raise PlanError(f"stage {self.trace.stage}: the list ends without {word}")
        for buffer, states in self.buffers.items():
            for key, state in enumerate(states):
                if state not in (FREED, NONE):
                    raise self.leftover(f"{buffer.name} of micro-batch {key // chunks}, chunk {key % chunks}", state)

    def leftover(self, what: str, state: int) -> PlanError:
        """A buffer that the list's end leaves behind."""
        return PlanError(f"stage {self.trace.stage}: the list ends with {what} {State(state).name}, expected FREED")
