"""Packed rows as others make them, to compare with: rows of up to the longest length, as many to each micro-batch.

packed_rows      first fit decreasing: the longest sample first, each into the first row with room
packed_next_fit  in arrival order, a new row where the sample does not fit; then to a multiple of the replicas by
                 splitting the longest rows, as data-parallel balancing in Megatron's samplers does
packed_balanced  a fixed number of rows, a multiple of the replicas; the longest sample first, each into the row of
                 the least attention work (sum of squared lengths) with room

A micro-batch of several rows is one packed row of all their samples, as attention with packed sequences runs it.
"""

from collections.abc import Iterator

import numpy as np

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.planning.partition import OrderedPartitions, Partition
from megatron_dynapipe.planning.problem import BatchProblem, IntArray
from megatron_dynapipe.units import BatchLayout

_Rows = list[IntArray]


def packed_partitions(problem: BatchProblem, settings: PartitionSettings) -> OrderedPartitions:
    """The algorithm's rows, by every number of rows to a micro-batch and recompute mode that fit with one in flight.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    inputs, targets = problem.input_positions, problem.target_positions
    longest = (
        settings.padded_input_length or int(inputs.max()),
        settings.padded_target_length or int(targets.max()),
    )
    _check_room(inputs, targets, *longest)
    match settings.algorithm:
        case PartitionAlgorithm.PACKED_NEXT_FIT:
            rows = next_fit(inputs, targets, *longest, replicas=problem.replicas)
        case PartitionAlgorithm.PACKED_BALANCED:
            rows = balanced(inputs, targets, *longest, replicas=problem.replicas)
        case _:
            rows = pack(inputs, targets, *longest)
    memory_bytes = problem.memory_limit_bytes - problem.model_state_bytes
    partitions = []
    for members in _offered(rows, settings):
        sizes = np.array([len(each) for each in members], np.int64)
        for mode in range(len(problem.modes)):
            modes = np.full(len(members), mode, np.int64)
            costs, covered = problem.costs_of(members, [BatchLayout.PACKED] * len(members), modes)
            if covered.all() and (costs.bytes_alone <= memory_bytes).all():
                partitions.append(Partition(sizes=sizes, modes=modes, layout=BatchLayout.PACKED))
    return OrderedPartitions(order=np.concatenate(rows), partitions=tuple(partitions))


def _offered(rows: _Rows, settings: PartitionSettings) -> Iterator[_Rows]:
    """Samples of each micro-batch, for every number of rows to each."""
    given = settings.micro_batch_size
    for size in [given] if given else [1 << power for power in range(len(rows).bit_length())]:
        yield [np.concatenate(rows[first : first + size]) for first in range(0, len(rows), size)]


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


def next_fit(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int, *, replicas: int) -> _Rows:
    """Samples of each row, in arrival order; arguments as `pack`."""
    rows: list[list[int]] = [[]]
    used_input = used_target = 0
    for sample, lengths in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True)):
        if rows[-1] and (used_input + lengths[0] > longest_input or used_target + lengths[1] > longest_target):
            rows.append([])
            used_input = used_target = 0
        rows[-1].append(sample)
        used_input, used_target = used_input + lengths[0], used_target + lengths[1]
    positions = inputs + targets
    while len(rows) % replicas and max(map(len, rows)) > 1:
        longest = max(range(len(rows)), key=lambda row: (len(rows[row]) > 1, int(positions[rows[row]].sum())))
        half = int(np.searchsorted(np.cumsum(positions[rows[longest]]), positions[rows[longest]].sum() / 2)) or 1
        half = min(half, len(rows[longest]) - 1)
        rows[longest : longest + 1] = [rows[longest][:half], rows[longest][half:]]
    return [np.array(row, np.int64) for row in rows]


def balanced(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int, *, replicas: int) -> _Rows:
    """Samples of each row, of as few rows as hold them all this way; arguments as `pack`."""
    needed = max(-(-int(inputs.sum()) // longest_input), -(-int(targets.sum()) // max(longest_target, 1)))
    rows = -(-max(needed, 1) // replicas) * replicas
    while (found := _spread(inputs, targets, longest_input, longest_target, rows)) is None:
        rows += replicas
    return [row for row in found if len(row)]


def _spread(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int, rows: int) -> _Rows | None:
    """The samples over so many rows; None where one finds no room."""
    left_input, left_target = np.full(rows, longest_input, np.int64), np.full(rows, longest_target, np.int64)
    work = np.zeros(rows, np.int64)
    members: list[list[int]] = [[] for _ in range(rows)]
    lengths = inputs + targets
    for sample in np.argsort(-lengths, kind="stable").tolist():
        room = (left_input >= inputs[sample]) & (left_target >= targets[sample])
        if not room.any():
            return None
        row = int(np.where(room, work, np.iinfo(np.int64).max).argmin())
        members[row].append(sample)
        left_input[row] -= inputs[sample]
        left_target[row] -= targets[sample]
        work[row] += lengths[sample] ** 2
    return [np.array(row, np.int64) for row in members]


def _check_room(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int) -> None:
    if inputs.max() > longest_input or targets.max() > longest_target:
        raise ConfigError(
            f"rows of {longest_input} input and {longest_target} target positions cannot hold samples of up to"
            f" {inputs.max()} and {targets.max()}",
            hint="truncate the samples, or pack into longer rows",
        )
