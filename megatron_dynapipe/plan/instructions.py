"""The instructions a pipeline stage executes: a small closed set of frozen records (paper section 3, table 1).

Each record is an array on the wire whose first element is a number given by hand: numbers are never reused, so a new
instruction does not renumber stored plans. Each has a one-line text form (`plan.text`).

A *pass* is a `Forward` or a `Backward` of one micro-batch through one *chunk* (virtual stage) of the stage; without
interleaving the chunk is always 0. A backward pass may be divided: `BackwardInput` makes the gradients of its input,
which the previous stage waits for, and a later `BackwardWeight` those of the linear layers' weights.
"""

import enum

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

INSTRUCTION_TYPES: tuple[type[Instruction], ...] = (
    Load,
    Forward,
    Backward,
    SendStart,
    SendWait,
    RecvStart,
    RecvWait,
    Free,
    BackwardInput,
    BackwardWeight,
)

SENT_BUFFER = {Payload.ACTIVATION: Buffer.OUTPUT, Payload.GRADIENT: Buffer.INPUT_GRAD}
RECEIVED_BUFFER = {Payload.ACTIVATION: Buffer.INPUT, Payload.GRADIENT: Buffer.OUTPUT_GRAD}


class Channel(msgspec.Struct, frozen=True, order=True):
    """One FIFO of transfers over a pipeline: what it carries, which way, and whether around the ring's end.

    Every channel has a process group of its own, so that the transfers of one never wait for those of another.
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
