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
    EFFECTS,
    SENT_BUFFER,
    Free,
    Instruction,
    Payload,
    RecvStart,
    SendStart,
    Transfer,
)

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
