"""Instruction lists as text, checked by themselves, and micro-batches of some lengths."""

import re
from collections.abc import Sequence
from typing import Any

from megatron_dynapipe.core import instructions as ins
from megatron_dynapipe.core import verify
from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import (
    BatchLayout,
    ModelFamily,
    Recompute,
    Shape,
    input_positions,
    round_up,
    target_positions,
)
from megatron_dynapipe.core.verify_buffers import Dimensions, Steps


def verify_lists(
    lists: Sequence[Sequence[ins.Instruction]],
    *,
    micro_batches: int,
    chunks: int = 1,
    forward_only: bool = False,
    ordered_starts: bool = False,
) -> Steps:
    """Verify lists, one of each pipeline rank, as `verify` does; where passes and sends stand, for further checks."""
    about = {"forward_only": forward_only, "ordered_starts": ordered_starts}
    dimensions = Dimensions(stages=len(lists), chunks=chunks, micro_batches=micro_batches, **about)
    return verify.verify_lists(dimensions, lists)


PAYLOADS = {"F": ins.Payload.ACTIVATION, "B": ins.Payload.GRADIENT}
PASSES: dict[str, Any] = {"F": ins.Forward, "B": ins.Backward, "BI": ins.BackwardInput, "BW": ins.BackwardWeight}
TRANSFERS: dict[str, Any] = {
    "SEND": ins.SendStart,
    "WAIT_SEND": ins.SendWait,
    "RECV": ins.RecvStart,
    "WAIT_RECV": ins.RecvWait,
}
TRANSFER = re.compile(r"(\w+)_([FB])(\d+)(?:\.(\d+))?[<>](\d+)(?:\[([0-9x,]*)\])?")
OTHER = re.compile(r"(LOAD|F|B|BI|BW|FREE_[A-Z_]+?)(\d+)(?:\.(\d+))?")


def parse_instruction(word: str) -> ins.Instruction:
    """The instruction that `format_instruction` wrote."""
    if match := TRANSFER.fullmatch(word):
        kind, letter, micro_batch, chunk, peer, text = match.groups()
        place = PAYLOADS[letter], int(micro_batch), int(chunk or 0), int(peer)
        shapes = () if text is None else (tuple(tuple(map(int, s.split("x"))) for s in text.split(",") if s),)
        return TRANSFERS[kind](*place, *shapes)
    match = OTHER.fullmatch(word)
    assert match, word
    name, micro_batch, chunk = match[1], int(match[2]), int(match[3] or 0)
    if name == "LOAD":
        return ins.Load(micro_batch)
    if name.startswith("FREE_"):
        return ins.Free(ins.Buffer[name.removeprefix("FREE_")], micro_batch, chunk)
    return PASSES[name](micro_batch, chunk)


def parse_stages(text: str) -> tuple[tuple[ins.Instruction, ...], ...]:
    """The lists that `format_stages` wrote, a stage a line, between comments and empty lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert [line.partition(":")[0] for line in lines] == [f"stage {stage}" for stage in range(len(lines))]
    return tuple(tuple(map(parse_instruction, line.partition(":")[2].split())) for line in lines)


def micro_batch(shape: Shape, inputs: Sequence[int], targets: Sequence[int] = (), **fields: Any) -> MicroBatch:
    """Samples of these lengths, numbered from 0, a GPT's without targets; they cost a byte."""
    one = {"stored_bytes": (1,), "peak_bytes": (1,)} | fields
    one = {"recompute": (Recompute.NONE,) * len(one["stored_bytes"])} | one
    one |= {"sample_ids": tuple(range(len(inputs))), "target_lengths": tuple(targets) or (0,) * len(inputs)}
    return MicroBatch(input_lengths=tuple(inputs), shape=shape, **(one | fields))


def packed(family: ModelFamily, inputs: Sequence[int], targets: Sequence[int] = (), **fields: Any) -> MicroBatch:
    """The same in a packed row, as long as it need be."""
    shape = packed_shape(family, inputs, targets)
    return micro_batch(shape, inputs, targets, layout=BatchLayout.PACKED, **fields)


def packed_shape(family: ModelFamily, input_tokens: Sequence[int], target_tokens: Sequence[int]) -> Shape:
    """The shape of samples packed into one row, given their lengths in tokens: `[1, inputs, targets]`."""
    inputs = sum(input_positions(family, tokens) for tokens in input_tokens)
    return Shape(1, round_up(inputs), round_up(sum(target_positions(family, tokens) for tokens in target_tokens)))
