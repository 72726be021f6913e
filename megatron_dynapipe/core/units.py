"""Named units and the shapes everything is measured in.

Inside the planner time is an integer number of nanoseconds and memory an integer number of bytes, so that a plan is
the same on every machine. Files and people read milliseconds and megabytes (1 MB = 1,000,000 bytes).
"""

import enum
from typing import NamedTuple

NS_PER_MS = 1_000_000
BYTES_PER_MB = 1_000_000

LENGTH_MULTIPLE = 8
"""Lengths of micro-batches are padded up to a multiple of this (tensor cores want it; the cost models are in it)."""


class ModelFamily(enum.StrEnum):
    """The kinds of model that a run may train."""

    GPT = "gpt"
    T5 = "t5"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a second stack, the decoder, has targets of its own; else a sample is a single sequence."""
        return self is ModelFamily.T5


class Recompute(enum.StrEnum):
    """The part of a micro-batch's forward that a stage keeps: all, all but attention's inside, or its input alone."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class BatchLayout(enum.StrEnum):
    """How the samples of a micro-batch lie: each in a row of its own, padded, or one after another in a single row."""

    PADDED = "padded"
    PACKED = "packed"


class Shape(NamedTuple):
    """The shape of a micro-batch: rows × input positions (× target positions).

    A padded micro-batch has a row for each sample, a packed one a single row. `target_length` is 0 for decoder-only
    models.
    """

    size: int
    input_length: int
    target_length: int = 0

    @property
    def positions(self) -> int:
        """Padded positions, the model's work in tokens."""
        return self.size * (self.input_length + self.target_length)

    def __str__(self) -> str:
        lengths = f"{self.input_length}" if not self.target_length else f"{self.input_length}+{self.target_length}"
        return f"{self.size}x{lengths}"


def in_mb(*sizes: int) -> list[str]:
    """Sizes in bytes as megabytes for a message: with as many decimals as tell different sizes apart."""
    for decimals in range(7):  # six show every byte
        texts = [f"{size / BYTES_PER_MB:.{decimals}f} MB" for size in sizes]
        if len(set(texts)) == len(set(sizes)):
            break
    return texts


def amount(count: int, of: str) -> str:
    """In words: "1 rank", "1,024 ranks"."""
    return f"{count:,} {of}" + ("" if count == 1 else "s")


def round_up(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """The least multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def sequence_positions(tokens: int) -> int:
    """Positions of a decoder-only sample: of n tokens, those numbered 2 to n are predicted from those before them."""
    return max(tokens - 1, 1)


def input_positions(family: ModelFamily, tokens: int) -> int:
    """Positions the first stack runs for a sample of `tokens` input tokens."""
    return tokens if family.is_encoder_decoder else sequence_positions(tokens)


def target_positions(family: ModelFamily, tokens: int) -> int:
    """Positions the decoder is given room for, for a target of `tokens` tokens; 0 for decoder-only models.

    A T5 target of n tokens trains on n + 1 positions (start token in, end token out); shapes count n + 2, as the
    published planner does, so that predictions can be compared with its figures.
    """
    return tokens + 2 if family.is_encoder_decoder else 0
