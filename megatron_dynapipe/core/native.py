"""The planner's compiled core (`csrc/`), and the fast verification of instruction lists that it does."""

from collections.abc import Sequence

import msgspec
import numpy as np

from megatron_dynapipe.core.costs import ABSENT, LARGEST_COORDINATE, LARGEST_COST, IntArray
from megatron_dynapipe.core.errors import InstallationError
from megatron_dynapipe.core.instructions import EFFECTS, PASS_TYPES, Buffer, Instruction, Pass, Payload
from megatron_dynapipe.core.verify_buffers import Dimensions, Steps

try:
    from megatron_dynapipe.core import _native as core
except ImportError as error:
    raise InstallationError(
        f"expected the planner's native core, megatron_dynapipe.core._native, got: {error}",
        hint="install this package again with this Python: that builds it (a clone's scripts import"
        " the clone's own package: make setup, or pip install -e .)",
    ) from error

__all__ = ["FEW_ROWS", "NEVER", "PassOrder", "agree", "core", "fast_verify", "from_codes", "to_codes"]

NEVER = 2**61
"""Above every time that the core predicts; what it returns where there is no time."""
FEW_ROWS = core.FEW_ROWS
"""Micro-batches of a replica: a search of so few may end far from where its start promises."""

PassOrder = tuple[tuple[Pass, ...], ...]
"""Per pipeline stage, its forward and backward passes in the order in which it runs them."""

_NUMBERS = {kind: number for number, kind in enumerate(PASS_TYPES)}
"""The native core numbers passes, too: a pass is (micro-batch · chunks + chunk) · 4 + the number of its type."""


def agree(name: str, expected: object) -> None:
    """Check that the core numbers something as Python does; raises InstallationError where it is of another version."""
    if (actual := core.CONSTANTS.get(name)) != expected:
        raise InstallationError(
            f"expected a native core in which {name} is {expected}, got {actual}",
            hint="install this package again with this Python: that builds it",
        )


for _name, _constant in (
    ("ABSENT", ABSENT),
    ("LARGEST_COST", LARGEST_COST),
    ("LARGEST_COORDINATE", LARGEST_COORDINATE),
    ("NEVER", NEVER),
    ("Instruction", {kind.__name__: kind.__struct_config__.tag for kind in EFFECTS}),
    ("InstructionFields", {kind.__name__: 1 + len(kind.__struct_fields__) for kind in EFFECTS}),
    ("Buffer", dict(Buffer.__members__)),
    ("Payload", dict(Payload.__members__)),
    ("Pass", {kind.__name__: number for kind, number in _NUMBERS.items()}),
):
    agree(_name, _constant)


def to_codes(order: PassOrder, chunks: int) -> IntArray:
    """Passes as the native core takes them: int64[stages, most passes of a stage], filled up with -1."""
    codes = np.full((len(order), max(map(len, order), default=0)), -1, np.int64)
    for stage, passes in enumerate(order):
        codes[stage, : len(passes)] = [
            (step.micro_batch * chunks + step.chunk) * len(PASS_TYPES) + _NUMBERS[type(step)] for step in passes
        ]
    return codes


def from_codes(codes: IntArray, chunks: int) -> PassOrder:
    """The passes of every stage from what `to_codes` makes."""
    return tuple(tuple(_pass_of(code, chunks) for code in stage if code >= 0) for stage in codes.tolist())


def _pass_of(code: int, chunks: int) -> Pass:
    place, kind = divmod(code, len(PASS_TYPES))
    micro_batch, chunk = divmod(place, chunks)
    return PASS_TYPES[kind](micro_batch, chunk)


_encode = msgspec.msgpack.Encoder().encode


def fast_verify(dimensions: Dimensions, lists: Sequence[Sequence[Instruction]]) -> Steps | None:
    """The places of passes and sends in lists, and what messages hold; None if the lists cannot run.

    For `core.verify.verify`, which then says why. It reads the lists in the bytes in which they are published, and
    does not depend on how they are made.
    """
    holds, passes, sends, messages = core.fast_verify(
        _encode(lists), dimensions.chunks, dimensions.micro_batches, dimensions.forward_only, dimensions.ordered_starts
    )
    return Steps(passes=passes, sends=sends, messages=messages) if holds else None
