"""The costs of a packed row: samples one after another in a single row, attention kept apart.

Tables that were measured on packed rows give it as a part that is linear in the row's positions and attention of each
sample. From tables of padded micro-batches it is derived: sample i is charged 1/b of a padded micro-batch of b samples
of its own lengths, b = positions of the row / positions of the sample, inputs and targets together; where that size was
not measured or did not fit, the largest size below it that did. So a row runs as efficiently as a padded micro-batch of
as many positions, and long samples pay for their attention.

    share(b)  v(1)/1       falling as the kernel fills       v(16)/16  constant: size 32 did not fit
              ─┴───────────────────────────────────────────────┴───────

Between two sizes v is linear in b, so a share is A / positions + B. The native core (`csrc/costs/packed.cpp`) follows
the same rules with the same rounding.
"""

import numpy as np

from megatron_dynapipe.core.costs import ABSENT, CostTables, IntArray, PackedTables, Quantity, at_point
from megatron_dynapipe.core.units import round_up

_LARGEST_SHARE = 2**40
_LARGEST_ROW = 2**20


def packed_costs(tables: CostTables, inputs: IntArray, targets: IntArray) -> IntArray | None:
    """Modules' costs of one packed row, int64[kinds, len(Quantity)]; None where the tables do not cover it.

    Args:
        tables: modules' costs.
        inputs: int64[samples], positions of every sample's input, not rounded.
        targets: int64[samples], of its target; 0 for decoder-only models.
    """
    row_inputs, row_targets = round_up(int(inputs.sum())), round_up(int(targets.sum()))
    if max(row_inputs, row_targets) > _LARGEST_ROW:
        return None
    if tables.packed is not None:
        return _measured(tables.packed, inputs, targets, row_inputs, row_targets)
    by_size = tables.at_lengths(inputs, targets, separate=True)
    positions = row_inputs + row_targets
    rows, shape = len(tables.kinds) * len(Quantity), by_size.shape[1:3]
    falling, constant = [0] * rows, [0] * rows
    for costs, sample_positions in zip(
        by_size.reshape(len(inputs), rows, -1).tolist(), np.maximum(inputs + targets, 1).tolist(), strict=True
    ):
        if any(row[0] == ABSENT or max(row) > _LARGEST_SHARE for row in costs):
            return None
        for row, values in enumerate(costs):
            a, b = _share(values, tables.sizes.tolist(), sample_positions, positions)
            falling[row] += a
            constant[row] += b
    costs_of_row = [max(0, _nearest(a, positions) + b) for a, b in zip(falling, constant, strict=True)]
    return np.array(costs_of_row, np.int64).reshape(shape)


def _share(values: list[int], sizes: list[int], sample_positions: int, positions: int) -> tuple[int, int]:
    """A and B of one sample's share, given its padded costs at every size of the grid."""
    if sample_positions * sizes[0] > positions:  # below the smallest size its cost is taken
        return sample_positions * values[0], 0
    cell = max(k for k, size in enumerate(sizes) if sample_positions * size <= positions)
    last = max(k for k in range(cell + 1) if values[k] != ABSENT)
    if last == cell and cell + 1 < len(sizes) and values[cell + 1] != ABSENT:
        width, rise = sizes[cell + 1] - sizes[cell], values[cell + 1] - values[cell]
        a = sample_positions * values[cell] - _half_up(rise * sizes[cell] * sample_positions, width)
        if abs(a) <= sample_positions * _LARGEST_SHARE:
            return a, _half_up(rise, width)
    return 0, _half_up(values[last], sizes[last])


def _measured(
    packed: PackedTables, inputs: IntArray, targets: IntArray, row_inputs: int, row_targets: int
) -> IntArray | None:
    kinds = len(packed.linear)
    linear, attention = (
        at_point(values.reshape(-1, *values.shape[2:]), *grid, *lengths).reshape(-1, kinds, len(Quantity))
        for values, grid, lengths in (
            (
                packed.linear,
                (packed.row_inputs, packed.row_targets),
                (np.array([row_inputs]), np.array([row_targets])),
            ),
            (packed.attention, (packed.inputs, packed.targets), (inputs, targets)),
        )
    )
    if (linear == ABSENT).any() or (attention == ABSENT).any():
        return None
    return np.asarray(linear[0] + attention.sum(axis=0), np.int64)


def _half_up(value: int, by: int) -> int:
    """value / by, rounded to the nearest, halves up."""
    return (2 * value + by) // (2 * by)


def _nearest(value: int, by: int) -> int:
    """value / by, rounded to the nearest, halves away from 0."""
    return (value + by // 2) // by if value >= 0 else -((by // 2 - value) // by)
