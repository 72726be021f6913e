"""Other ways to make micro-batches, to compare with and for users who want them.

    uniform      the samples sorted, as many to each micro-batch
    token_based  the samples sorted, as many to each micro-batch as keep its padded positions within a number
    padding      every sample padded to the longest, as many to each micro-batch: training without packing
    packing      samples joined into rows of the longest length, as many rows to each: predicted only
    packed_rows  samples in packed rows of up to the longest length, first fit decreasing
    the others   samples in packed rows as other trainers make them, see `planning.rivals`

Each takes one recompute mode for all. Where the number is not given, several are offered and the fastest is taken.
"""

import enum
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.partition import Partition
from megatron_dynapipe.planning.problem import BatchProblem, IntArray
from megatron_dynapipe.planning.rivals import RIVALS
from megatron_dynapipe.units import BatchLayout

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class PartitionAlgorithm(enum.StrEnum):
    """How micro-batches are made."""

    DP = "dp"
    TOKEN_BASED = "token_based"
    UNIFORM = "uniform"
    PADDING = "padding"
    PACKING = "packing"
    PACKED_ROWS = "packed_rows"
    DP_BALANCED = "dp_balanced"
    VERL = "verl"
    SLIME = "slime"

    @property
    def layout(self) -> BatchLayout | None:
        """The layout of the micro-batches that it makes; None where it chooses."""
        if self is PartitionAlgorithm.DP:
            return None
        packed = self is PartitionAlgorithm.PACKED_ROWS or self in RIVALS
        return BatchLayout.PACKED if packed else BatchLayout.PADDED


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How micro-batches are made.

    Attributes:
        algorithm: dynamic programming on the cost model, or one of the others.
        micro_batch_size: samples of a micro-batch, for uniform and padding, rows for packed rows; None tries powers of
            two, of rows more (`rivals.row_sizes`).
        micro_batch_tokens: padded positions of a micro-batch, for token_based; None tries powers of two.
        padded_input_length: for padding, what every input is padded to, and for packed rows the most input positions
            of a row; None: the batch's longest.
        padded_target_length: the same for targets.
    """

    algorithm: PartitionAlgorithm = PartitionAlgorithm.DP
    micro_batch_size: _AtLeastOne | None = None
    micro_batch_tokens: _AtLeastOne | None = None
    padded_input_length: _AtLeastOne | None = None
    padded_target_length: _AtLeastOne | None = None

    def __post_init__(self) -> None:
        if self.algorithm is PartitionAlgorithm.PACKING:
            raise ConfigError(
                "packing without masks between samples lets them attend to one another: it is predicted, never trained",
                hint="use packed_rows, which keeps samples apart, or dp with packed micro-batches",
            )
        by_size = self.algorithm not in (PartitionAlgorithm.DP, PartitionAlgorithm.TOKEN_BASED, *RIVALS)
        if self.micro_batch_size is not None and not by_size:
            raise ConfigError(
                f"a micro-batch size goes with uniform, padding and packed rows, not with {self.algorithm}"
            )
        if self.micro_batch_tokens is not None and self.algorithm is not PartitionAlgorithm.TOKEN_BASED:
            raise ConfigError(f"a number of micro-batch tokens goes with token_based, not with {self.algorithm}")


def baseline_partitions(problem: BatchProblem, order: IntArray, settings: PartitionSettings) -> tuple[Partition, ...]:
    """Every partition of the order that the algorithm offers and that fits with one micro-batch in flight.

    Args:
        problem: samples, costs, memory.
        order: every sample once.
        settings: an algorithm other than dp.
    """
    inputs, targets = problem.inputs[order], problem.targets[order]
    memory_bytes = problem.memory_limit_bytes - problem.model_state_bytes
    partitions = []
    for sizes in _offered(inputs, targets, settings):
        firsts = np.cumsum(sizes) - sizes
        longest = (np.maximum.reduceat(lengths, firsts) for lengths in (inputs, targets))
        shapes = np.stack([sizes, *longest], axis=1)
        for mode in range(len(problem.modes)):
            modes = np.full(len(sizes), mode, np.int64)
            costs, covered = problem.costs(shapes, modes)
            if covered.all() and (costs.bytes_alone <= memory_bytes).all():
                partitions.append(Partition(sizes=sizes, modes=modes))
    return tuple(partitions)


def _offered(inputs: IntArray, targets: IntArray, settings: PartitionSettings) -> Iterator[IntArray]:
    """Sizes of the micro-batches of every partition that the algorithm offers, for lengths in the order."""
    samples = len(inputs)
    if settings.algorithm is PartitionAlgorithm.TOKEN_BASED:
        positions = inputs + targets
        most = int(positions.max()) * samples
        given = settings.micro_batch_tokens
        for tokens in [given] if given else _powers(int(positions.max()), 2 * most):
            yield _within(inputs, targets, tokens)
    else:
        given = settings.micro_batch_size
        for size in [given] if given else _powers(1, 2 * samples):
            whole, rest = divmod(samples, size)
            yield np.array([size] * whole + [rest] * (rest > 0), np.int64)


def _powers(least: int, most: int) -> Iterator[int]:
    """Powers of two from the first that is at least `least`, below `most`."""
    power = 1 << (least - 1).bit_length()
    while power < most:
        yield power
        power *= 2


def _within(inputs: IntArray, targets: IntArray, tokens: int) -> IntArray:
    """As many samples to each micro-batch as keep its padded positions within `tokens`, at least one."""
    sizes: list[int] = []
    size = longest_input = longest_target = 0
    for input_length, target_length in zip(inputs.tolist(), targets.tolist(), strict=True):
        longest = max(longest_input, input_length), max(longest_target, target_length)
        if size and (size + 1) * sum(longest) > tokens:
            sizes.append(size)
            size, longest = 0, (input_length, target_length)
        size += 1
        longest_input, longest_target = longest
    return np.array([*sizes, size], np.int64)
