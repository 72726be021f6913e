"""Partitions into packed rows that no cost model chooses: first fit decreasing, and the rules of other trainers.

`packed_rows` fills rows of the longest length, the longest sample first, each into the first row with room; a
micro-batch of several rows is one packed row of all their samples, as attention with packed sequences runs it. A rival
packs into rows of several sizes. Its own assignment to replicas is offered, and one by times.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from megatron_dynapipe.core.errors import ConfigError, PlanningError
from megatron_dynapipe.core.partition import OrderedPartitions, Partition
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.ways.rivals.rules import Room, Rule, row_sizes

_Rows = list[IntArray]


def partitions(problem: BatchProblem, offered: Iterable[_Rows]) -> OrderedPartitions:
    """All micro-batches offered that fit with one in flight, by recompute mode."""
    memory_bytes = problem.memory_limit_bytes - problem.model_state_bytes
    fitting = []
    for members in offered:
        sizes = np.array([len(row) for row in members], np.int64)
        for mode in range(len(problem.modes)):
            modes = np.full(len(members), mode, np.int64)
            costs, covered = problem.costs_of(members, [BatchLayout.PACKED] * len(members), modes)
            if covered.all() and (costs.bytes_alone <= memory_bytes).all():
                order = np.concatenate(members)
                one = Partition(sizes=sizes, modes=modes, layout=BatchLayout.PACKED, order=order)
                fitting += [one, replace(one, in_turn=True)][: problem.replicas]
    return OrderedPartitions(order=np.arange(len(problem.inputs)), partitions=tuple(fitting))


def joined(rows: _Rows, rows_each: int | None) -> Iterator[_Rows]:
    """Samples of each micro-batch of so many rows; None tries several."""
    for size in [rows_each] if rows_each else row_sizes([len(rows)], 1, 1):
        yield [np.concatenate(rows[first : first + size]) for first in range(0, len(rows), size)]


def rows_of_rule(
    problem: BatchProblem, rule: Rule, longest_input: int, hidden_size: int, *, parts: int = 1
) -> Iterator[_Rows]:
    """The rule's micro-batches, for rows of several sizes; the first size is such a part of the longest sample.

    Raises:
        PlanningError: the rule does not serve these replicas.
    """
    lengths = (problem.input_positions + problem.target_positions).tolist()
    group = problem.layout.stages if problem.layout.chunks > 1 else 1
    last = None
    for size in row_sizes(lengths, max(longest_input, *lengths), parts):
        rows = rule(lengths, Room(size, problem.replicas, group, hidden_size))
        if rows and rows != last:
            yield [np.array(row, np.int64) for row in rows]
            last = rows
    if last is None:
        of = f"a multiple of {problem.replicas * group} micro-batches of {len(lengths)} samples"
        raise PlanningError(f"the rule cannot make {of}", hint="use larger global batches or fewer replicas")


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
    check_room(inputs, targets, longest_input, longest_target)
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


def check_room(inputs: IntArray, targets: IntArray, longest_input: int, longest_target: int) -> None:
    """Raise a ConfigError where a sample is longer than a row."""
    if inputs.max() > longest_input or targets.max() > longest_target:
        raise ConfigError(
            f"rows of {longest_input} input and {longest_target} target positions cannot hold samples of up to"
            f" {inputs.max()} and {targets.max()}",
            hint="truncate the samples, or pack into longer rows",
        )
