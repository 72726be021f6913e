"""Which tokens of a decoder-only sequence are to be learned, and which are left of one that is too long.

input, target        s s u u A A u u | A A A      A: turns of the assistant; the last one is the target
loss on everything   . 1 1 1 1 1 1 1   1 1 1      the first token is predicted by nothing
loss on targets      . 0 0 0 1 1 0 0   1 1 1
"""

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.sampling import Cutter, SpanTable

Tokens = npt.NDArray[Any]


class LossOn(enum.StrEnum):
    """The tokens of a decoder-only sample that count: the target's (and those in earlier turns), or all."""

    TARGETS = "targets"
    EVERYTHING = "everything"


def learned(sample: int, inputs: int, targets: int, loss_on: LossOn, spans: SpanTable) -> npt.NDArray[np.float32]:
    """float32[given + wanted], 1 for each token of a decoder-only sequence that is to be learned."""
    if loss_on is LossOn.EVERYTHING:
        return np.ones(inputs + targets, np.float32)
    counts = np.zeros(inputs + targets, np.float32)
    counts[inputs:] = 1
    for first, end in spans.of(sample):
        counts[first : min(end, inputs)] = 1
    return counts


def sequence(
    cutter: Cutter, sample: int, pair: tuple[Tokens, Tokens], planned: int, loss_on: LossOn
) -> tuple[Tokens, npt.NDArray[np.float32]]:
    """What a decoder-only sample that is planned with so many tokens is trained on, and which of these are learned.

    Raises:
        DataError: the sample is not the one that was planned.
    """
    inputs, targets = pair
    counts = learned(sample, len(inputs), len(targets), loss_on, cutter.spans)
    kept = cutter.planned(sample, len(inputs), len(targets), (planned, 0))
    of_counts = _kept(kept, (counts[: len(inputs)], counts[len(inputs) :]))
    return np.concatenate(_kept(kept, pair)), np.concatenate(of_counts)


def kept_pair(
    cutter: Cutter, sample: int, pair: tuple[Tokens, Tokens], planned: tuple[int, int]
) -> tuple[Tokens, Tokens]:
    """What is kept of the input and of the target of a sample that is planned with these lengths; raises as `sequence`.

    Args:
        cutter: cuts the split's samples.
        sample: its number.
        pair: its tokens in the dataset.
        planned: tokens of input and target; of a decoder-only sample both together, and 0.
    """
    inputs, targets = pair
    return _kept(cutter.planned(sample, len(inputs), len(targets), planned), pair)


def _kept(kept: tuple[int, int, int], pair: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> tuple[Any, Any]:
    head, tail, target = kept
    inputs, targets = pair
    if tail:
        inputs = np.concatenate([inputs[:head], inputs[len(inputs) - tail :]])
    return inputs[: head + tail], targets[:target]
