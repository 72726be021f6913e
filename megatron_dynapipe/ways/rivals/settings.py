"""Other ways to make micro-batches, to compare with and for users who want them.

    uniform      the samples sorted, as many to each micro-batch
    token_based  the samples sorted, as many to each micro-batch as keep its padded positions within a number
    padding      every sample padded to the longest, as many to each micro-batch: training without packing
    packing      samples joined into rows of the longest length, as many rows to each: predicted only
    packed_rows  samples in packed rows of up to the longest length, first fit decreasing
    verl, slime  samples in packed rows as these trainers make them, see `ways.rivals.rules`

Each takes one recompute mode for all. If the number is not given, several are offered and the fastest is taken.
"""

import enum
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import OrderedPartitions
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, round_up
from megatron_dynapipe.ways.rivals import packed, padded
from megatron_dynapipe.ways.rivals.rules import RIVALS

SLIMES_PARTS = 8
"""slime's rows may be shorter than the longest sample: the first size is such a part of it."""
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class PartitionAlgorithm(enum.StrEnum):
    """How micro-batches are made."""

    TOKEN_BASED = "token_based"
    UNIFORM = "uniform"
    PADDING = "padding"
    PACKING = "packing"
    PACKED_ROWS = "packed_rows"
    VERL = "verl"
    SLIME = "slime"

    @property
    def layout(self) -> BatchLayout:
        """The layout of the micro-batches that it makes."""
        packed = self is PartitionAlgorithm.PACKED_ROWS or self in RIVALS
        return BatchLayout.PACKED if packed else BatchLayout.PADDED


TITLES: dict[str, str] = {
    "packed_rows": "rows of the longest sample's length",
    "verl": "rows packed as verl does",
    "slime": "rows packed as slime does",
}
"""What today's rows are, for people."""


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `core.partition.Partitioner`: how micro-batches are made in place of the planner's own search.

    Attributes:
        micro_batch_size: samples of a micro-batch, for uniform and padding, rows for packed rows; None tries powers of
            two, of rows more (`rules.row_sizes`).
        micro_batch_tokens: padded positions of a micro-batch, for token_based; None tries powers of two.
        padded_input_length: for padding, what every input is padded to, and for packed rows the most input positions
            of a row; None: the batch's longest.
        padded_target_length: the same for targets.
    """

    algorithm: PartitionAlgorithm
    micro_batch_size: _AtLeastOne | None = None
    micro_batch_tokens: _AtLeastOne | None = None
    padded_input_length: _AtLeastOne | None = None
    padded_target_length: _AtLeastOne | None = None

    def __post_init__(self) -> None:
        if self.algorithm is PartitionAlgorithm.PACKING:
            raise ConfigError(
                "packing without masks between samples lets them attend to one another: it is predicted, never trained",
                hint="use packed_rows, which keeps samples apart, or the planner with packed micro-batches",
            )
        by_size = self.algorithm not in (PartitionAlgorithm.TOKEN_BASED, *RIVALS)
        if self.micro_batch_size is not None and not by_size:
            raise ConfigError(
                f"a micro-batch size goes with uniform, padding and packed rows, not with {self.algorithm}"
            )
        if self.micro_batch_tokens is not None and self.algorithm is not PartitionAlgorithm.TOKEN_BASED:
            raise ConfigError(f"a number of micro-batch tokens goes with token_based, not with {self.algorithm}")

    @property
    def layout(self) -> BatchLayout:
        """The layout of the micro-batches that it makes."""
        return self.algorithm.layout

    def pad(self, samples: Samples) -> Samples:
        """The samples, for padding with the lengths that they are padded to; raises DataError where one is longer."""
        if self.algorithm is not PartitionAlgorithm.PADDING:
            return samples
        return _padded(samples, self.padded_input_length, self.padded_target_length)

    def partitions(self, problem: BatchProblem, order: IntArray, *, hidden_size: int) -> OrderedPartitions:
        """Every partition of the algorithm that fits with one micro-batch in flight, by size and recompute mode.

        Raises:
            ConfigError: a sample is longer than a row.
            PlanningError: a rival's rule does not serve these replicas.
        """
        if self.layout is BatchLayout.PADDED:
            inputs = problem.inputs[order]
            targets = problem.targets[order]
            if self.algorithm is PartitionAlgorithm.TOKEN_BASED:
                sizes = padded.sizes_within(inputs, targets, self.micro_batch_tokens)
            else:
                sizes = padded.equal_sizes(len(order), self.micro_batch_size)
            return OrderedPartitions(order=order, partitions=padded.partitions(problem, order, sizes))
        longest = (
            self.padded_input_length or int(problem.input_positions.max()),
            self.padded_target_length or int(problem.target_positions.max()),
        )
        packed.check_room(problem.input_positions, problem.target_positions, *longest)
        if self.algorithm is PartitionAlgorithm.PACKED_ROWS:
            rows = packed.pack(problem.input_positions, problem.target_positions, *longest)
            return packed.partitions(problem, packed.joined(rows, self.micro_batch_size))
        parts = SLIMES_PARTS if self.algorithm is PartitionAlgorithm.SLIME else 1
        rule = RIVALS[self.algorithm]
        return packed.partitions(problem, packed.rows_of_rule(problem, rule, longest[0], hidden_size, parts=parts))


def in_rows(settings: PlannerSettings, partition: PartitionSettings) -> PlannerSettings:
    """A run's settings with packed rows of another trainer, as they are trained: 1F1B, interleaved, whole samples."""
    return msgspec.structs.replace(
        settings,
        micro_batch_layouts=(BatchLayout.PACKED,),
        partition=partition,
        schedule=ScheduleSettings(method="1f1b"),
        slices="off",
        context_teams=1,
        split_backward="off",
    )


def _padded(samples: Samples, input_length: int | None, target_length: int | None) -> Samples:
    """Every sample padded to these lengths, or where they are None to the batch's longest.

    Raises:
        DataError: a sample is longer.
    """
    longest = int(samples.inputs.max()), int(samples.targets.max())
    asked = (input_length, target_length)
    lengths = [most if length is None else round_up(length) for most, length in zip(longest, asked, strict=True)]
    if lengths[0] < longest[0] or lengths[1] < longest[1]:
        raise DataError(
            f"samples of up to {longest[0]} input and {longest[1]} target positions cannot be padded to"
            f" {lengths[0]} and {lengths[1]}",
            hint="truncate the samples, or pad to longer lengths",
        )
    return replace(
        samples,
        inputs=np.full_like(samples.inputs, lengths[0]),
        targets=np.full_like(samples.targets, lengths[1]),
    )
