"""Instructions and instruction lists as text that parses back.

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

import re
from collections.abc import Iterable, Sequence

from megatron_dynapipe.errors import PlanDecodeError
from megatron_dynapipe.plan.instructions import (
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
    Transfer,
)

_LETTER = {Payload.ACTIVATION: "F", Payload.GRADIENT: "B"}
_PAYLOAD = {letter: payload for payload, letter in _LETTER.items()}
_PASS_WORD: dict[type[Pass], str] = {Forward: "F", Backward: "B", BackwardInput: "BI", BackwardWeight: "BW"}
_PASS_TYPE = {word: kind for kind, word in _PASS_WORD.items()}
_TRANSFER: dict[type[Transfer], tuple[str, str]] = {
    SendStart: ("SEND", ">"),
    SendWait: ("WAIT_SEND", ">"),
    RecvStart: ("RECV", "<"),
    RecvWait: ("WAIT_RECV", "<"),
}
_TRANSFER_TYPE = {name: kind for kind, (name, _) in _TRANSFER.items()}

_N = r"([0-9]{1,18})"
_INDEX = rf"{_N}(?:\.{_N})?"
_LOAD = re.compile(rf"LOAD{_N}")
_PASS = re.compile(rf"(F|B|BI|BW){_INDEX}")
_FREE = re.compile(rf"FREE_({'|'.join(b.name for b in Buffer)}){_INDEX}")
_MOVE = re.compile(rf"(WAIT_SEND|SEND|WAIT_RECV|RECV)_([FB]){_INDEX}([<>]){_N}(?:\[([0-9x,]*)\])?")


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


def parse_instruction(word: str) -> Instruction:
    """The instruction that `format_instruction` wrote.

    Raises:
        PlanDecodeError: the word is not an instruction.
    """
    if match := _PASS.fullmatch(word):
        return _PASS_TYPE[match[1]](int(match[2]), int(match[3] or 0))
    if match := _LOAD.fullmatch(word):
        return Load(int(match[1]))
    if match := _FREE.fullmatch(word):
        return Free(Buffer[match[1]], int(match[2]), int(match[3] or 0))
    if (match := _MOVE.fullmatch(word)) and _TRANSFER[_TRANSFER_TYPE[match[1]]][1] == match[5]:
        return _parse_transfer(word, match)
    raise PlanDecodeError(f"expected an instruction such as F3, LOAD3 or SEND_F3>2[64x8x128], got {word!r}")


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


def _parse_transfer(word: str, match: re.Match[str]) -> Transfer:
    kind = _TRANSFER_TYPE[match[1]]
    payload, micro_batch, chunk, peer = _PAYLOAD[match[2]], int(match[3]), int(match[4] or 0), int(match[6])
    starts = kind is SendStart or kind is RecvStart
    if starts != (match[7] is not None):
        raise PlanDecodeError(f"expected shapes in brackets on SEND and RECV and nowhere else, got {word!r}")
    if kind is SendStart or kind is RecvStart:
        return kind(payload, micro_batch, chunk, peer, _parse_shapes(word, match[7]))
    assert kind is SendWait or kind is RecvWait
    return kind(payload, micro_batch, chunk, peer)


def _parse_shapes(word: str, text: str) -> tuple[TensorShape, ...]:
    try:
        return tuple(tuple(int(n) for n in shape.split("x")) for shape in text.split(",")) if text else ()
    except ValueError as error:
        raise PlanDecodeError(f"expected shapes such as [64x8x128,16x8x128], got {word!r}") from error
