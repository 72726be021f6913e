"""Samples of a global batch joined to rows as in 2023, and rows of equal length."""

from typing import Any

import numpy as np

Sample = tuple[Any, Any]
"""Tokens of an input and of its target."""


def rows_of_2023(samples: list[Sample], longest: tuple[int, int]) -> list[Sample]:
    """Samples joined to rows of at most the maximum length, which attend to one another: first fit, longest first.

    A decoder-only row is trained on all of its tokens but the first.

    Args:
        samples: of a global batch.
        longest: tokens of a row's inputs, or of a decoder-only row; and of its targets, 0 for decoder-only models.
    """
    decoder_only = not longest[1]
    pieces = [(np.concatenate(pair), np.zeros(0, np.int64)) if decoder_only else pair for pair in samples]
    rows: list[tuple[list[Any], list[Any]]] = []
    left: list[list[int]] = []
    for given, wanted in sorted(pieces, key=lambda pair: -(len(pair[0]) + len(pair[1]))):
        sizes = len(given), len(wanted)
        row = next((r for r, free in enumerate(left) if sizes[0] <= free[0] and sizes[1] <= free[1]), len(rows))
        if row == len(rows):
            rows.append(([], []))
            left.append(list(longest))
        rows[row][0].append(given)
        rows[row][1].append(wanted)
        left[row] = [left[row][0] - sizes[0], left[row][1] - sizes[1]]
    joined_rows = [(np.concatenate(inputs), np.concatenate(targets)) for inputs, targets in rows]
    return [(row[:1], row[1:]) for row, _ in joined_rows] if decoder_only else joined_rows


def equal_rows(samples: list[Sample], tokens: int, *, multiple: int = 1) -> Any:
    """The tokens of all samples one after another, cut into rows of so many, without the rest: int64[rows, tokens].

    Their number is a multiple of `multiple`; of too few tokens for that, they begin again from the front.
    """
    every = np.concatenate([np.concatenate(pair) for pair in samples]).astype(np.int64)
    count = max(len(every) // tokens // multiple, 1) * multiple
    return np.resize(every, count * tokens).reshape(count, tokens)
