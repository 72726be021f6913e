"""Partitions into padded micro-batches that no cost model chooses: of so many samples, or of so many positions."""

from collections.abc import Iterable, Iterator

import numpy as np

from megatron_dynapipe.core.partition import Partition
from megatron_dynapipe.core.problem import BatchProblem, IntArray


def partitions(problem: BatchProblem, order: IntArray, offered: Iterable[IntArray]) -> tuple[Partition, ...]:
    """Every partition offered that fits with one micro-batch in flight, by recompute mode."""
    inputs = problem.inputs[order]
    targets = problem.targets[order]
    memory_bytes = problem.memory_limit_bytes - problem.model_state_bytes
    fitting = []
    for sizes in offered:
        firsts = np.cumsum(sizes) - sizes
        longest = (np.maximum.reduceat(lengths, firsts) for lengths in (inputs, targets))
        shapes = np.stack([sizes, *longest], axis=1)
        for mode in range(len(problem.modes)):
            modes = np.full(len(sizes), mode, np.int64)
            costs, covered = problem.costs(shapes, modes)
            if covered.all() and (costs.bytes_alone <= memory_bytes).all():
                fitting.append(Partition(sizes=sizes, modes=modes))
    return tuple(fitting)


def sizes_within(inputs: IntArray, targets: IntArray, tokens: int | None) -> Iterator[IntArray]:
    """Sizes of micro-batches whose padded positions stay within `tokens`; None tries powers of two."""
    positions = inputs + targets
    longest = int(positions.max())
    for most in [tokens] if tokens else _powers(longest, 2 * longest * len(inputs)):
        yield _within(inputs, targets, most)


def equal_sizes(samples: int, size: int | None) -> Iterator[IntArray]:
    """So many samples to each micro-batch, the rest to the last; None tries powers of two."""
    for number in [size] if size else _powers(1, 2 * samples):
        whole, rest = divmod(samples, number)
        yield np.array([number] * whole + [rest] * (rest > 0), np.int64)


def _powers(least: int, most: int) -> Iterator[int]:
    """Powers of two from the first that is at least `least`, below `most`."""
    power = 1 << (least - 1).bit_length()
    while power < most:
        yield power
        power *= 2


def _within(inputs: IntArray, targets: IntArray, tokens: int) -> IntArray:
    """Sizes of micro-batches whose padded positions stay within `tokens`, or of one sample."""
    sizes: list[int] = []
    size = longest_input = longest_target = 0
    for input_length, target_length in zip(inputs.tolist(), targets.tolist(), strict=True):
        longest = max(longest_input, input_length), max(longest_target, target_length)
        if size and (size + 1) * sum(longest) > tokens:
            sizes.append(size)
            size = 0
            longest = (input_length, target_length)
        size += 1
        longest_input, longest_target = longest
    return np.array([*sizes, size], np.int64)
