"""Instruction lists as text, checked by themselves, and the shapes of packed rows."""

import re
from collections.abc import Sequence

from megatron_dynapipe.errors import PlanDecodeError
from megatron_dynapipe.plan import verify
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.text import parse_instruction
from megatron_dynapipe.plan.verify_buffers import Dimensions, Steps
from megatron_dynapipe.units import ModelFamily, Shape, input_positions, round_up, target_positions

_STAGE = re.compile(r"stage (\d+):(.*)")


def verify_lists(
    lists: Sequence[Sequence[Instruction]],
    *,
    micro_batches: int,
    chunks: int = 1,
    forward_only: bool = False,
    ordered_starts: bool = False,
) -> Steps:
    """Verify that instruction lists, one per pipeline rank, run every pass once and never stall.

    Returns:
        Where passes and sends stand, for further checks.

    Raises:
        PlanError: as `verify`.
    """
    dimensions = Dimensions(
        stages=len(lists),
        chunks=chunks,
        micro_batches=micro_batches,
        forward_only=forward_only,
        ordered_starts=ordered_starts,
    )
    return verify.verify_lists(dimensions, lists)


def parse_stages(text: str) -> tuple[tuple[Instruction, ...], ...]:
    """The lists that `format_stages` wrote; empty lines and lines starting with # are passed over.

    Raises:
        PlanDecodeError: a line is not a stage, stages are out of order, or a word is not an instruction.
    """
    stages: list[tuple[Instruction, ...]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _STAGE.fullmatch(line)
        if match is None or int(match[1]) != len(stages):
            raise PlanDecodeError(f"line {number}: expected 'stage {len(stages)}: …', got {line[:40]!r}")
        try:
            stages.append(tuple(parse_instruction(word) for word in match[2].split()))
        except PlanDecodeError as error:
            raise PlanDecodeError(f"line {number}: {error.message}") from error
    return tuple(stages)


def packed_shape(family: ModelFamily, input_tokens: Sequence[int], target_tokens: Sequence[int]) -> Shape:
    """The shape of samples packed into one row, given their lengths in tokens: `[1, inputs, targets]`."""
    inputs = sum(input_positions(family, tokens) for tokens in input_tokens)
    return Shape(1, round_up(inputs), round_up(sum(target_positions(family, tokens) for tokens in target_tokens)))
