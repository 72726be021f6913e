"""Orders of samples in which neighbours are alike, so that micro-batches of neighbours waste little padding.

Decoder-only samples are sorted. Encoder–decoder samples have two lengths, and no order suits both; two sweeps are
offered; local search improves both, and the partition takes the better one.
"""

import numpy as np

from megatron_dynapipe.planning.problem import IntArray

BAND_RATIO = 5
"""Longest over shortest target within a band of `by_bands`."""


def candidate_orders(inputs: IntArray, targets: IntArray) -> list[IntArray]:
    """The orders to choose from.

    Args:
        inputs: int64[samples], padded input lengths.
        targets: int64[samples], padded target lengths, all 0 for decoder-only models.
    """
    one = by_length(inputs, targets)
    return [one, by_bands(inputs, targets)] if targets.any() else [one]


def by_length(inputs: IntArray, targets: IntArray) -> IntArray:
    """Longest first, by input length and then by target length; equal samples in the order given."""
    return np.lexsort((np.arange(len(inputs)), -targets, -inputs)).astype(np.int64)


def by_bands(inputs: IntArray, targets: IntArray) -> IntArray:
    """Bands of similar target lengths, the longest first; within them by input length, down and up in turn.

    The turn joins bands where their inputs are alike.
    """
    order = np.lexsort((np.arange(len(inputs)), -targets))
    descending = targets[order]
    bands: list[IntArray] = []
    start = 0
    while start < len(order):
        end = start + int(np.searchsorted(-descending[start:], -descending[start] / BAND_RATIO, side="right"))
        band = order[start:end]
        sign = 1 if len(bands) % 2 else -1
        bands.append(band[np.lexsort((band, -targets[band], sign * inputs[band]))])
        start = end
    return np.concatenate(bands).astype(np.int64)
