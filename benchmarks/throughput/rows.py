"""Samples of a global batch joined to rows as in 2023, and rows of equal length."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A packed row as Megatron's `SFTDataset` gives it; arrays have the row's length.

    Attributes:
        tokens, labels: int64; each sample's own next tokens, and 0 behind its last one.
        loss_mask: float32, 1 where a label counts.
        positions: int64, of each token in its sample.
        offsets: int32[samples + 1], where samples begin; the last one ends with the row.
    """

    tokens: Any
    labels: Any
    loss_mask: Any
    positions: Any
    offsets: Any


def packed_rows(samples: list[Sample], length: int, *, targets_alone: bool, multiple: int = 1) -> list[Row]:
    """Decoder-only samples packed into rows of so many positions: first fit, the longest first.

    A sample of n tokens takes n - 1 positions, of which all count, or those alone whose label is of its target.

    Args:
        samples: of a global batch.
        length: positions of every row.
        targets_alone: whether labels of inputs do not count.
        multiple: the number of rows is one of this; rows without samples do not count.
    """
    bins: list[list[Sample]] = []
    free: list[int] = []
    for sample in sorted(samples, key=lambda pair: -(len(pair[0]) + len(pair[1]))):
        size = len(sample[0]) + len(sample[1]) - 1
        place = next((place for place, left in enumerate(free) if left >= size), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(length)
        bins[place].append(sample)
        free[place] -= size
    bins += [[]] * (-len(bins) % multiple)
    return [_row(members, length, targets_alone=targets_alone) for members in bins]


def _row(samples: list[Sample], length: int, *, targets_alone: bool) -> Row:
    tokens, labels, positions = (np.zeros(length, np.int64) for _ in range(3))
    mask, starts, end = np.zeros(length, np.float32), [0], 0
    for given, wanted in samples:
        whole = np.concatenate([given, wanted])
        begin, end = end, end + len(whole) - 1
        tokens[begin:end], labels[begin:end] = whole[:-1], whole[1:]
        counted = min(len(wanted), len(whole) - 1) if targets_alone else len(whole) - 1
        mask[end - counted : end] = 1.0
        positions[begin:end] = np.arange(end - begin)
        starts.append(end)
    positions[end:] = np.arange(length - end) + (positions[end - 1] + 1 if end else 0)
    offsets = np.array([*starts[:-1], length] if samples else [0, length], np.int32)
    return Row(tokens=tokens, labels=labels, loss_mask=mask, positions=positions, offsets=offsets)
