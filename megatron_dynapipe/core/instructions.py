"""The instructions a pipeline stage executes: a small closed set of frozen records (paper section 3, table 1).

Each record is an array on the wire whose first element is a number given by hand: numbers are never reused, so a new
instruction does not renumber stored plans. What each does to the stage's buffers, and how it is written and counted,
stands once, in the table `EFFECTS`; text, verification, memory, lowering, timers and pictures read it there.

A *pass* is a `Forward` or a `Backward` of one micro-batch through one *chunk* (virtual stage) of the stage; without
interleaving the chunk is always 0. A backward pass may be divided: `BackwardInput` makes the gradients of its input,
which the previous stage waits for, and a later `BackwardWeight` makes the gradients of the linear layers' weights.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

import msgspec

TensorShape = tuple[int, ...]
"""Dimensions of one tensor that crosses a stage boundary: [positions, micro-batch size, hidden]."""


class Payload(enum.IntEnum):
    """The content of a transfer: a forward pass's boundary tensors, or the gradients of them."""

    ACTIVATION = 1
    GRADIENT = 2


class Buffer(enum.IntEnum):
    """The tensors a stage holds for one micro-batch and chunk, named from the stage's own point of view."""

    DATA = 1
    """The micro-batch itself: tokens, labels, masks. One per micro-batch, whatever the number of chunks."""
    INPUT = 2
    """Activations received from the previous stage."""
    OUTPUT = 3
    """Activations made for the next stage."""
    OUTPUT_GRAD = 4
    """Gradients of OUTPUT, received from the next stage."""
    INPUT_GRAD = 5
    """Gradients of INPUT, made for the previous stage."""


class Load(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=1):
    """Bring a micro-batch's tensors to the device: makes DATA."""

    micro_batch: int


class Forward(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=2):
    """Run the chunk forward: needs DATA and, past the first virtual stage, INPUT; makes OUTPUT but on the last."""

    micro_batch: int
    chunk: int = 0


class Backward(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=3):
    """Run the chunk backward: needs OUTPUT_GRAD but on the last virtual stage; makes INPUT_GRAD past the first."""

    micro_batch: int
    chunk: int = 0


class BackwardInput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=9):
    """Run the chunk backward but for the weights of its linear layers: needs and makes what `Backward` does.

    Keeps what `BackwardWeight` needs: inputs and output gradients of the linear layers, in the forward's stored memory.
    """

    micro_batch: int
    chunk: int = 0


class BackwardWeight(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=10):
    """Add the gradients of the linear layers' weights that `BackwardInput` has left out; drops what it kept."""

    micro_batch: int
    chunk: int = 0


class SendStart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=4):
    """Start sending OUTPUT (activations) or INPUT_GRAD (gradients) to stage `peer`; does not block."""

    payload: Payload
    micro_batch: int
    chunk: int
    peer: int
    shapes: tuple[TensorShape, ...]


class SendWait(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=5):
    """Wait until the send has completed and its tensors may be freed."""

    payload: Payload
    micro_batch: int
    chunk: int
    peer: int


class RecvStart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=6):
    """Allocate and start receiving INPUT (activations) or OUTPUT_GRAD (gradients) from stage `peer`."""

    payload: Payload
    micro_batch: int
    chunk: int
    peer: int
    shapes: tuple[TensorShape, ...]


class RecvWait(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=7):
    """Wait until what was received may be read."""

    payload: Payload
    micro_batch: int
    chunk: int
    peer: int


class Free(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag=8):
    """Drop a buffer. What the backward pass needs of it is kept by the autograd graph until that pass has run."""

    buffer: Buffer
    micro_batch: int
    chunk: int = 0


Pass = Forward | Backward | BackwardInput | BackwardWeight
Transfer = SendStart | SendWait | RecvStart | RecvWait
Instruction = Load | Pass | Transfer | Free

SENT_BUFFER = {Payload.ACTIVATION: Buffer.OUTPUT, Payload.GRADIENT: Buffer.INPUT_GRAD}
RECEIVED_BUFFER = {Payload.ACTIVATION: Buffer.INPUT, Payload.GRADIENT: Buffer.OUTPUT_GRAD}

POOLS = {
    Buffer.INPUT: Buffer.INPUT,
    Buffer.OUTPUT_GRAD: Buffer.OUTPUT_GRAD,
    Buffer.OUTPUT: Buffer.OUTPUT,
    Buffer.INPUT_GRAD: Buffer.OUTPUT,
}
"""Which pool's buffers messages lie in (`core.memory`): what is sent shares one, named by activations."""


class State(enum.IntEnum):
    """The state of a buffer, or of a *graph*: what a forward keeps for its backward."""

    NONE = 0
    """The stage never has this buffer: no INPUT at the model's start, no OUTPUT at its end, no gradients forward."""
    ABSENT = 1
    READY = 2
    MOVING = 3
    USED = 4
    FREED = 5


Move = tuple[State, State]
"""The state in which an instruction finds a buffer, and the state in which it leaves it."""

MADE: Move = (State.ABSENT, State.READY)
NEEDED: Move = (State.READY, State.READY)
USED_UP: Move = (State.READY, State.USED)
DROPPED: Move = (State.READY, State.FREED)


class Work(enum.StrEnum):
    """The kind of work that an instruction's time counts to."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"
    TRANSFER = "transfer"
    WAIT = "wait"
    FREE = "free"


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What an instruction does.

    Attributes:
        word: its text form begins with it (`core.instructions`).
        work: what its time counts to.
        buffers: how it moves buffers of its micro-batch and chunk, where the stage has them. DATA is loaded and freed
            for all chunks at once, and used up chunk by chunk.
        graph: how a pass moves its graph; None where the instruction is not a pass.
        named: how it moves the one buffer that the instruction itself names, which the stage must have.
        carries: of a transfer, the buffer that each payload names.
    """

    word: str
    work: Work
    buffers: Mapping[Buffer, Move] = {}
    graph: Move | None = None
    named: Move | None = None
    carries: Mapping[Payload, Buffer] = {}

    @property
    def graphs_kept(self) -> int:
        """1 for a pass that leaves a graph behind, -1 for one that drops it, 0 for all else."""
        return 0 if self.graph is None else (self.graph[1] in _KEPT) - (self.graph[0] in _KEPT)


_KEPT = (State.READY, State.USED)

_FORWARD = Effect(
    word="F",
    work=Work.FORWARD,
    buffers={Buffer.DATA: USED_UP, Buffer.INPUT: NEEDED, Buffer.OUTPUT: MADE},
    graph=MADE,
)
_BACKWARD = {Buffer.OUTPUT_GRAD: USED_UP, Buffer.INPUT: USED_UP, Buffer.INPUT_GRAD: MADE}

EFFECTS: Mapping[type[Instruction], Effect] = MappingProxyType(
    {
        Load: Effect(word="LOAD", work=Work.LOAD, buffers={Buffer.DATA: MADE}),
        Forward: _FORWARD,
        Backward: Effect(word="B", work=Work.BACKWARD, buffers=_BACKWARD, graph=DROPPED),
        BackwardInput: Effect(word="BI", work=Work.BACKWARD, buffers=_BACKWARD, graph=USED_UP),
        BackwardWeight: Effect(word="BW", work=Work.WEIGHTS, graph=(State.USED, State.FREED)),
        SendStart: Effect(word="SEND", work=Work.TRANSFER, named=(State.READY, State.MOVING), carries=SENT_BUFFER),
        SendWait: Effect(word="WAIT_SEND", work=Work.WAIT, named=(State.MOVING, State.USED), carries=SENT_BUFFER),
        RecvStart: Effect(word="RECV", work=Work.TRANSFER, named=(State.ABSENT, State.MOVING), carries=RECEIVED_BUFFER),
        RecvWait: Effect(word="WAIT_RECV", work=Work.WAIT, named=(State.MOVING, State.READY), carries=RECEIVED_BUFFER),
        Free: Effect(word="FREE", work=Work.FREE, named=(State.USED, State.FREED)),
    }
)
"""What every instruction does in a training plan."""

FORWARD_ONLY_EFFECTS: Mapping[type[Instruction], Effect] = MappingProxyType(
    {kind: effect for kind, effect in EFFECTS.items() if effect.graph is None}
    | {
        Forward: msgspec.structs.replace(
            _FORWARD,
            buffers={**_FORWARD.buffers, Buffer.INPUT: USED_UP},
            graph=(State.ABSENT, State.FREED),
        )
    }
)
"""What every instruction does in a forward-only plan, whose forwards keep nothing."""

PASS_TYPES: tuple[type[Pass], ...] = get_args(Pass)
"""In the order in which the native core numbers them."""


def effects_of(*, forward_only: bool) -> Mapping[type[Instruction], Effect]:
    """The table of a plan's instructions."""
    return FORWARD_ONLY_EFFECTS if forward_only else EFFECTS


def buffer_of(instruction: Transfer | Free) -> Buffer:
    """The buffer that an instruction names."""
    if isinstance(instruction, Free):
        return instruction.buffer
    return EFFECTS[type(instruction)].carries[instruction.payload]


class Channel(msgspec.Struct, frozen=True, order=True):
    """One FIFO of transfers over a pipeline: what it carries, which way, and whether around the ring's end.

    Every channel has a process group of its own, so that the transfers of one never wait for another's.
    """

    payload: Payload
    downstream: bool
    """From a stage to the next one (True), or to the one before (False)."""
    wraps: bool
    """Between the last and the first stage (interleaved schedules)."""


def channel_of(payload: Payload, source: int, destination: int, stages: int) -> Channel:
    """The channel of a transfer from stage `source` to stage `destination` of a pipeline of `stages`.

    Activations flow 0 → 1 → … → n-1 (→ 0 for the next chunk), gradients the other way.
    """
    downstream = payload is Payload.ACTIVATION
    step = 1 if downstream else -1
    if not 0 <= source < stages or not 0 <= destination < stages or (source + step) % stages != destination:
        raise ValueError(f"no channel carries {payload.name} from stage {source} to {destination} of {stages}")
    return Channel(payload, downstream, wraps=source + step != destination)


_LETTER = {Payload.ACTIVATION: "F", Payload.GRADIENT: "B"}


def format_instruction(instruction: Instruction) -> str:
    """One instruction as one word."""
    effect = EFFECTS[type(instruction)]
    chunk = getattr(instruction, "chunk", 0)
    index = f"{instruction.micro_batch}.{chunk}" if chunk else f"{instruction.micro_batch}"
    if isinstance(instruction, Free):
        return f"{effect.word}_{instruction.buffer.name}{index}"
    if not isinstance(instruction, Transfer):
        return f"{effect.word}{index}"
    arrow = ">" if effect.carries is SENT_BUFFER else "<"
    word = f"{effect.word}_{_LETTER[instruction.payload]}{index}{arrow}{instruction.peer}"
    if isinstance(instruction, SendStart | RecvStart):
        word += "[" + ",".join("x".join(map(str, shape)) for shape in instruction.shapes) + "]"
    return word


def format_stages(stages: Iterable[Iterable[Instruction]]) -> str:
    """A pipeline's lists, one line per stage."""
    return "\n".join(f"stage {stage}: {' '.join(map(format_instruction, steps))}" for stage, steps in enumerate(stages))


def point_at(instructions: Sequence[Instruction], step: int, *, around: int = 4) -> str:
    """The neighbourhood of one instruction of a list, with an arrow at it, for error messages."""
    first = max(step - around, 0)
    last = min(step + around + 1, len(instructions))
    words = [format_instruction(i) for i in instructions[first:last]]
    words[step - first] = f"--> {words[step - first]} <--"
    return " ".join(["…"] * (first > 0) + words + ["…"] * (last < len(instructions)))
