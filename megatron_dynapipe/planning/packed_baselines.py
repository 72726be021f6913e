"""Partitions into packed rows that no cost model chooses, to compare with: first fit decreasing, and `planning.rivals`.

`packed_rows` fills rows of the longest length, the longest sample first, each into the first row with room; a
micro-batch of several rows is one packed row of all their samples, as attention with packed sequences runs it. A rival
packs into rows of several sizes. Its own assignment to replicas is offered, and one by times.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_dynapipe.errors import ConfigError, PlanningError
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.planning.partition import OrderedPartitions, Partition
from megatron_dynapipe.planning.problem import BatchProblem, IntArray
from megatron_dynapipe.planning.rivals import RIVALS, Room, row_sizes
from megatron_dynapipe.units import BatchLayout

_Rows = list[IntArray]


def packed_partitions(problem: BatchProblem, settings: PartitionSettings, *, hidden_size: int) -> OrderedPartitions:
    """The algorithm's rows, by every size of a micro-batch and recompute mode that fit with one in flight.

    Raises:
        ConfigError: a sample is longer than a row.
        PlanningError: a rival's rule does not serve these replicas.
    """
    inputs, targets = problem.input_positions, problem.target_positions
    longest = (
        settings.padded_input_length or int(inputs.max()),
        settings.padded_target_length or int(targets.max()),
    )
    _check_room(inputs, targets, *longest)
    if settings.algorithm is PartitionAlgorithm.PACKED_ROWS:
        offered = _joined(pack(inputs, targets, *longest), settings)
    else:
        offered = _of_rival(problem, settings.algorithm, longest[0], hidden_size)
    memory_bytes = problem.memory_limit_bytes - problem.model_state_bytes
    partitions = []
    for members in offered:
        sizes = np.array([len(each) for each in members], np.int64)
        for mode in range(len(problem.modes)):
            modes = np.full(len(members), mode, np.int64)
            costs, covered = problem.costs_of(members, [BatchLayout.PACKED] * len(members), modes)
            if covered.all() and (costs.bytes_alone <= memory_bytes).all():
                order = np.concatenate(members)
                one = Partition(sizes=sizes, modes=modes, layout=BatchLayout.PACKED, order=order)
                partitions += [one, replace(one, in_turn=True)][: problem.replicas]
    return OrderedPartitions(order=np.arange(len(inputs)), partitions=tuple(partitions))


def _joined(rows: _Rows, settings: PartitionSettings) -> Iterator[_Rows]:
    """Samples of each micro-batch, for 1, 2, 3 … rows to each."""
    given = settings.micro_batch_size
    for size in [given] if given else row_sizes([len(rows)], 1, 1):
        yield [np.concatenate(rows[first : first + size]) for first in range(0, len(rows), size)]


def _of_rival(problem: BatchProblem, rival: str, longest_input: int, hidden_size: int) -> Iterator[_Rows]:
    """The rival's micro-batches, for rows of several sizes; slime's may be shorter than the longest sample."""
    lengths = (problem.input_positions + problem.target_positions).tolist()
    group = problem.layout.stages if problem.layout.chunks > 1 else 1
    last = None
    for size in row_sizes(lengths, max(longest_input, *lengths), 8 if rival == "slime" else 1):
        rows = RIVALS[rival](lengths, Room(size, problem.replicas, group, hidden_size))
        if rows and rows != last:
            yield [np.array(row, np.int64) for row in rows]
            last = rows
    if last is None:
        of = f"a multiple of {problem.replicas * group} micro-batches of {len(lengths)} samples"
        raise PlanningError(f"{rival} cannot make {of}", hint="use larger global batches or fewer replicas")


def pack(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int) -> list[IntArray]:
    """Samples of each row: first fit, the longest input first.

    Args:
        inputs: int64[samples], positions of each input.
        targets: int64[samples], positions of each target, 0 for decoder-only models.
        longest_input: positions of a row for inputs.
        longest_target: positions of a row for targets.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    _check_room(inputs, targets, longest_input, longest_target)
    rows: list[list[int]] = []
    left_input = np.zeros(len(inputs), np.int64)
    left_target = np.zeros(len(inputs), np.int64)
    for sample in np.lexsort((np.arange(len(inputs)), -targets, -inputs)).tolist():
        used = len(rows)
        fitting = (left_input[:used] >= inputs[sample]) & (left_target[:used] >= targets[sample])
        row = int(fitting.argmax()) if fitting.any() else used
        if row == used:
            rows.append([])
            left_input[row], left_target[row] = longest_input, longest_target
        rows[row].append(sample)
        left_input[row] -= inputs[sample]
        left_target[row] -= targets[sample]
    return [np.array(row, np.int64) for row in rows]


def _check_room(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int) -> None:
    if inputs.max() > longest_input or targets.max() > longest_target:
        raise ConfigError(
            f"rows of {longest_input} input and {longest_target} target positions cannot hold samples of up to"
            f" {inputs.max()} and {targets.max()}",
            hint="truncate the samples, or pack into longer rows",
        )
