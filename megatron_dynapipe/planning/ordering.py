"""Orders of samples in which neighbours are alike, so that micro-batches of neighbours waste little padding."""

import numpy as np

from megatron_dynapipe.planning.problem import IntArray


def by_length(inputs: IntArray, targets: IntArray) -> IntArray:
    """Longest first, by input length and then by target length; equal samples in the order given.

    Args:
        inputs: int64[samples], padded input lengths.
        targets: int64[samples], padded target lengths.
    """
    return np.lexsort((np.arange(len(inputs)), -targets, -inputs)).astype(np.int64)
