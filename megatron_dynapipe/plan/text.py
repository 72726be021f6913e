"""Instructions and instruction lists as text, which says all of them: the tests parse it back.

    LOAD3                     bring micro-batch 3 to the device
    F3   F3.1                 forward pass of micro-batch 3 (on chunk 1)
    B3                        backward pass
    BI3  BW3                  its halves: gradients of inputs, gradients of weights
    RECV_F3<0[64x8x128]       start receiving activations of micro-batch 3 from stage 0, with every tensor's shape
    WAIT_RECV_F3<0            wait for them
    SEND_B3>0[64x8x128]       start sending gradients to stage 0
    WAIT_SEND_B3>0            wait until they are sent
    FREE_OUTPUT3              drop a buffer

A stage is one line, `stage 0: LOAD0 F0 …`; a replica is its stages' lines in order.
"""

from collections.abc import Iterable, Sequence

from megatron_dynapipe.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
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
    Transfer,
)

_LETTER = {Payload.ACTIVATION: "F", Payload.GRADIENT: "B"}
_PASS_WORD: dict[type[Pass], str] = {Forward: "F", Backward: "B", BackwardInput: "BI", BackwardWeight: "BW"}
_TRANSFER: dict[type[Transfer], tuple[str, str]] = {
    SendStart: ("SEND", ">"),
    SendWait: ("WAIT_SEND", ">"),
    RecvStart: ("RECV", "<"),
    RecvWait: ("WAIT_RECV", "<"),
}


def format_instruction(instruction: Instruction) -> str:
    """One instruction as one word."""
    match instruction:
        case Load(micro_batch):
            return f"LOAD{micro_batch}"
        case Forward() | Backward() | BackwardInput() | BackwardWeight():
            return f"{_PASS_WORD[type(instruction)]}{_index(instruction.micro_batch, instruction.chunk)}"
        case Free(buffer, micro_batch, chunk):
            return f"FREE_{buffer.name}{_index(micro_batch, chunk)}"
        case SendStart() | SendWait() | RecvStart() | RecvWait():
            return _format_transfer(instruction)


def format_stages(stages: Iterable[Iterable[Instruction]]) -> str:
    """A pipeline's lists, one line per stage."""
    return "\n".join(f"stage {stage}: {' '.join(map(format_instruction, steps))}" for stage, steps in enumerate(stages))


def point_at(instructions: Sequence[Instruction], step: int, *, around: int = 4) -> str:
    """The neighbourhood of one instruction of a list, with an arrow at it, for error messages."""
    first, last = max(step - around, 0), min(step + around + 1, len(instructions))
    words = [format_instruction(i) for i in instructions[first:last]]
    words[step - first] = f"--> {words[step - first]} <--"
    return " ".join(["…"] * (first > 0) + words + ["…"] * (last < len(instructions)))


def _index(micro_batch: int, chunk: int) -> str:
    return f"{micro_batch}.{chunk}" if chunk else f"{micro_batch}"


def _format_transfer(transfer: Transfer) -> str:
    name, arrow = _TRANSFER[type(transfer)]
    word = f"{name}_{_LETTER[transfer.payload]}{_index(transfer.micro_batch, transfer.chunk)}{arrow}{transfer.peer}"
    if isinstance(transfer, SendStart | RecvStart):
        word += "[" + ",".join("x".join(map(str, shape)) for shape in transfer.shapes) + "]"
    return word
