"""Plain text → samples: the next token of a decoder-only model, or T5's removed spans.

tokens            a b c d e f g h
next token        input a                 target b c d e f g h       the first token is predicted by nothing
span corruption   input a <0> d e <1> h   target <0> b c <1> f g     sentinels stand for removed spans
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError

NOISE = 0.15
"""Share of the tokens that are removed, and …"""
MEAN_SPAN = 3.0
"""… the mean length of a removed span: those of T5."""
LEAST_TOKENS = 2
SENTINEL = "<extra_id_{}>"


def pieces(tokens: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    """A text's tokens, `length` at a time; a last piece of a single token goes with the one before."""
    first = 0
    while first < len(tokens):
        left = len(tokens) - first
        size = left if left == length + 1 else min(length, left)
        yield tokens[first : first + size]
        first += size


def spans_removed(
    tokens: Sequence[int], sentinels: Sequence[int], seed: int, *, noise: float = NOISE, mean_span: float = MEAN_SPAN
) -> tuple[list[int], list[int]]:
    """Input and target of a corrupted piece of text; a function of the tokens and the seed.

    Raises:
        DataError: there are fewer sentinels than spans.
    """
    removed = min(max(round(len(tokens) * noise), 1), len(tokens) - 1)
    spans = min(max(round(removed / mean_span), 1), removed, len(tokens) - removed)
    if spans > len(sentinels):
        raise DataError(
            f"expected a tokenizer with {spans} sentinels ({SENTINEL.format(0)}, …) for {len(tokens)} tokens, it has "
            f"{len(sentinels)}",
            hint="take a T5's tokenizer, train one on the mixture, or give the task a smaller length",
        )
    random = np.random.Generator(np.random.PCG64(seed))
    noisy, kept = _divided(random, removed, spans), _divided(random, len(tokens) - removed, spans)
    given: list[int] = []
    wanted: list[int] = []
    at = 0
    for sentinel, keep, remove in zip(sentinels, kept, noisy, strict=False):
        given += [*tokens[at : at + keep], sentinel]
        wanted += [sentinel, *tokens[at + keep : at + keep + remove]]
        at += int(keep + remove)
    return given, wanted


def _divided(random: np.random.Generator, total: int, parts: int) -> npt.NDArray[Any]:
    """A number divided at random into parts of at least one."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
