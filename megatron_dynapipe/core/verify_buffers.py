"""Verify: one rank's list, on its own. Every buffer of every micro-batch goes through its states once, in order.

    DATA                   absent ─LOAD─► ready ───────────── every chunk's F ───────────────► used ─FREE─► freed
    INPUT, OUTPUT_GRAD     absent ─RECV─► moving ─WAIT_RECV─► ready ─ B (forward-only: F) ───► used ─FREE─► freed
    OUTPUT, INPUT_GRAD     absent ─F, B─► ready ─SEND─► moving ─WAIT_SEND────────────────────► used ─FREE─► freed
    the passes' graphs     absent ─F─► ready ─B─► freed, or ready ─BI─► used ─BW─► freed; BI is B to all buffers

Since each instruction is allowed in one state only and every buffer must end freed, a list that passes has every
pass, transfer and free exactly once, in an order that never uses what is not there. Which instruction moves which
buffer stands in `core.instructions.EFFECTS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import (
    PASS_TYPES,
    SENT_BUFFER,
    Buffer,
    Effect,
    Free,
    Instruction,
    Move,
    Pass,
    Payload,
    RecvStart,
    SendStart,
    State,
    TensorShape,
    Transfer,
    buffer_of,
    effects_of,
    format_instruction,
    point_at,
)


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
class Steps:
    """The places of passes and of starts of sends in each rank's list, if the lists can run.

    Attributes:
        messages: elements of messages that are held while each pass runs (`core.memory`).
    """

    passes: list[list[int]]
    sends: list[list[int]]
    messages: list[list[int]]


# A plan has thousands of steps, and reading an enum's member costs as much as the rest of a step's check.
NONE, ABSENT, READY, MOVING, USED, FREED = map(int, State)


def trace_stage(dimensions: Dimensions, stage: int, instructions: Sequence[Instruction]) -> "StageTrace":
    """Walk one rank's list.

    Raises:
        PlanError: an instruction stands where it cannot run, or the list ends with work or buffers left.
    """
    trace = StageTrace(dimensions, stage, instructions)
    step = -1
    try:
        for step, instruction in enumerate(instructions):
            trace.run(step, instruction)
    except PlanError as error:
        raise PlanError(f"stage {stage}, step {step}: {error.message}, at {point_at(instructions, step)}") from None
    trace.check_end()
    return trace


class StageTrace:
    """States of all buffers of one rank while its list is walked, and the list's passes and transfers in order.

    Attributes:
        passes: steps of passes.
        sends, receives: transfers by payload.
        waits: the waits of all payloads.
    """

    def __init__(self, dimensions: Dimensions, stage: int, instructions: Sequence[Instruction]) -> None:
        self.stage = stage
        self.instructions = instructions
        self.passes: list[int] = []
        self.sends: dict[Payload, list[TransferEnd]] = {payload: [] for payload in Payload}
        self.receives: dict[Payload, list[TransferEnd]] = {payload: [] for payload in Payload}
        self.waits: list[Wait] = []
        self._dimensions = dimensions
        self._effects = effects_of(forward_only=dimensions.forward_only)
        rows = dimensions.micro_batches
        chunks = dimensions.chunks
        full = [ABSENT] * chunks
        backward = [NONE if dimensions.forward_only else ABSENT] * chunks
        not_first = full if stage else [NONE, *full[1:]]
        not_last = [*full[1:], NONE] if stage == dimensions.stages - 1 else full
        self._graphs = full * rows
        self._buffers: dict[Buffer, list[int]] = {
            Buffer.DATA: full * rows,
            Buffer.INPUT: not_first * rows,
            Buffer.OUTPUT: not_last * rows,
            Buffer.OUTPUT_GRAD: list(map(min, not_last, backward)) * rows,
            Buffer.INPUT_GRAD: list(map(min, not_first, backward)) * rows,
        }
        self._sent: dict[Payload, dict[int, int]] = {payload: {} for payload in Payload}
        self._receiving: set[Payload] = set()

    def run(self, step: int, instruction: Instruction) -> None:
        """Take one step; raises PlanError where the instruction cannot run."""
        row = instruction.micro_batch
        chunk = getattr(instruction, "chunk", 0)
        if not 0 <= row < self._dimensions.micro_batches:
            raise PlanError(f"there are {self._dimensions.micro_batches} micro-batches")
        if not 0 <= chunk < self._dimensions.chunks:
            raise PlanError(f"the stage has {self._dimensions.chunks} chunks")
        effect = self._effects.get(type(instruction))
        if effect is None:
            raise PlanError("a forward-only plan has no backward passes")
        key = row * self._dimensions.chunks + chunk
        if effect.graph is not None:
            self._run_pass(step, key, effect)
        for buffer, move in effect.buffers.items():
            if self._buffers[buffer][key] != NONE:
                self._advance(buffer, key, move, whole=effect.graph is None)
        if isinstance(instruction, Transfer):
            self._transfer(step, key, instruction, effect)
        elif isinstance(instruction, Free):
            assert effect.named is not None
            if instruction.buffer is Buffer.DATA and chunk:
                raise PlanError("DATA is freed for all chunks at once, by the instruction of chunk 0")
            self._advance(instruction.buffer, key, effect.named, whole=True)

    def _run_pass(self, step: int, key: int, effect: Effect) -> None:
        assert effect.graph is not None
        before, after = effect.graph
        state = self._graphs[key]
        if state != before:
            early = "before the forward" if state == ABSENT else "before that of the inputs' gradients"
            raise PlanError(f"the {effect.work} pass runs {early if state < before else 'twice'}")
        self._graphs[key] = after
        self.passes.append(step)

    def _starts_from(self, kind: type[Pass], state: int) -> bool:
        """Whether a kind of pass is the one to run on a graph of this state."""
        effect = self._effects.get(kind)
        return effect is not None and effect.graph is not None and effect.graph[0] == state

    def _transfer(self, step: int, key: int, instruction: Transfer, effect: Effect) -> None:
        payload = instruction.payload
        stages = self._dimensions.stages
        sending = effect.carries is SENT_BUFFER
        downstream = sending == (payload is Payload.ACTIVATION)
        peer = (self.stage + (1 if downstream else -1)) % stages
        if instruction.peer != peer:
            raise PlanError(f"expected stage {peer} as peer")
        if isinstance(instruction, RecvStart) and payload in self._receiving:
            raise PlanError("the channel has a receive already that has not been waited for")
        assert effect.named is not None
        self._advance(buffer_of(instruction), key, effect.named)
        ends = (self.sends if sending else self.receives)[payload]
        if not isinstance(instruction, SendStart | RecvStart):
            number = self._sent[payload][key] if sending else len(ends) - 1
            self.waits.append(Wait(step, payload, sending, number))
            if not sending:
                self._receiving.discard(payload)
            return
        if sending:
            if self._dimensions.ordered_starts and ends:
                self.waits.append(Wait(step, payload, True, len(ends) - 1))
            self._sent[payload][key] = len(ends)
        else:
            self._receiving.add(payload)
        boundary = instruction.chunk * stages + self.stage - (not downstream)
        ends.append(TransferEnd(instruction.micro_batch, boundary, instruction.shapes, step))

    def _advance(self, buffer: Buffer, key: int, move: Move, *, whole: bool = False) -> None:
        """Move a buffer from one state to the next, and from no other; DATA on all chunks if `whole`."""
        states = self._buffers[buffer]
        before, after = move
        chunks = self._dimensions.chunks if whole and buffer is Buffer.DATA else 1
        for place in range(key, key + chunks):
            if states[place] != before:
                raise PlanError(f"{buffer.name} is {State(states[place]).name}, expected {before.name}")
            states[place] = after

    def check_end(self) -> None:
        """Raise a PlanError unless all passes have run and all buffers are freed."""
        chunks = self._dimensions.chunks
        for key, state in enumerate(self._graphs):
            if state != FREED:
                missing = next(kind for kind in PASS_TYPES if self._starts_from(kind, state))
                word = format_instruction(missing(key // chunks, key % chunks))
                raise PlanError(f"stage {self.stage}: the list ends without {word}")
        for buffer, states in self._buffers.items():
            for key, state in enumerate(states):
                if state not in (FREED, NONE):
                    raise PlanError(
                        f"stage {self.stage}: the list ends with {buffer.name} of micro-batch {key // chunks}, chunk "
                        f"{key % chunks} {State(state).name}, expected FREED"
                    )
