"""What micro-batches pay by themselves, however few samples they hold, from a model's cost tables."""

import copy
from typing import Self

import numpy as np

from megatron_dynapipe.choosing.least_costs import LeastCosts
from megatron_dynapipe.core.costs import Floats, Quantity
from megatron_dynapipe.core.problem import IntArray

_TURNS = 12
"""Of the line of `RowCosts.intercept`; it is below all costs after each."""


class RowCosts(LeastCosts):
    """Least costs under one mode, with what a row pays apart from its samples."""

    @classmethod
    def of(cls, least: LeastCosts) -> Self:
        """The same costs."""
        made = copy.copy(least)
        made.__class__ = cls
        assert isinstance(made, cls)
        return made

    def intercept(self, quantity: int, positions: float) -> Floats:
        """What a micro-batch of any size costs by itself: `[kinds]`.

        It is where the line that lies below all costs, and is the highest at so many positions, meets a micro-batch of
        none. The line is turned until it touches costs on both sides.
        """
        sizes, costs = self._points(quantity)
        shorter = sizes <= max(positions, sizes.min())
        longer = sizes >= max(min(positions, sizes.max()), 1)
        fixed = costs.min(axis=1)
        for _ in range(_TURNS):
            slope = ((costs[:, longer] - fixed[:, None]) / sizes[longer]).min(axis=1)
            slope = np.where(np.isfinite(slope), slope, 0.0)
            fixed = np.minimum(fixed, (costs[:, shorter] - slope[:, None] * sizes[shorter]).min(axis=1))
        return np.maximum(fixed, 0.0)

    def _points(self, quantity: int) -> tuple[Floats, Floats]:
        """Positions of every measured micro-batch, and its costs apart from attention in rows: `[kinds, points]`."""
        lengths = self.tables.inputs[:, None] + self.tables.targets
        sizes = [self.tables.sizes[:, None, None] * lengths]
        costs = [self.values[:, quantity]]
        if (packed := self.packed) is not None:
            sizes.append(packed.row_inputs[:, None] + packed.row_targets)
            costs.append(self._linear(quantity))
        return (
            np.concatenate([np.asarray(of, np.float64).ravel() for of in sizes]),
            np.concatenate([of.reshape(len(of), -1) for of in costs], axis=1),
        )

    def attending(self, quantity: Quantity, inputs: IntArray) -> Floats:
        """The part of `pass_time` that pieces pay by pairs of positions, not by position: `[samples, kinds]`."""
        return np.asarray(self._half_pairs(quantity) * inputs[:, None] ** 2)
