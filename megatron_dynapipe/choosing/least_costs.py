"""The least that a micro-batch, of any size, padded or packed, can charge a sample, from a model's cost tables.

Costs are linear between grid points, so that the least share of a micro-batch of b samples of some lengths, cost / b,
is that of a grid point, or of the sample's own lengths. Costs count as if they never fell with length:

    measured   ╱╲╱           counted[L] = the least of measured[L …]
              ╱      ──►              __╱
                                    ╱

Packed rows derived from padded costs charge a sample the same shares. If packed rows were measured, a row costs at
least its positions times the least cost of a position, and the attention of its samples.
"""

import numpy as np

from megatron_dynapipe.core.costs import ABSENT, PREFIX_QUANTITIES, CostTables, Floats, Quantity
from megatron_dynapipe.core.problem import IntArray
from megatron_dynapipe.costing.pieces import prefix_costs

INPUT, BOTH = len(Quantity), len(Quantity) + 1
"""After the quantities of the tables: of a backward pass what is not its second half; and forward and backward."""


class LeastCosts:
    """Costs under one mode that never fall with length: each the least of all that are as long or longer.

    Of micro-batches of some layouts; without `padded` in rows that were measured alone, where there are such.
    """

    def __init__(self, tables: CostTables, *, padded: bool = True, packed: bool = True) -> None:
        self.tables, self.packed = tables, tables.packed if packed else None
        self.values = _never_falling(tables.values if tables.separate is None else tables.separate)
        if not padded and self.packed is not None:
            self.values[:] = np.inf
        if self.packed is not None:
            self.linear, self.attention = map(_never_falling, (self.packed.linear, self.packed.attention))

    def whole(self, quantity: int, inputs: IntArray, targets: IntArray) -> Floats:
        """Of any micro-batch that holds a sample of these positions: `[samples, kinds]`."""
        least = _at(self.values[:, quantity], self.tables.inputs, self.tables.targets, inputs, targets).min(axis=2)
        if (packed := self.packed) is not None:
            row = _at(self.linear[:, quantity], packed.row_inputs, packed.row_targets, inputs, targets)
            least = np.minimum(
                least, row + _at(self.attention[:, quantity], packed.inputs, packed.targets, inputs, targets)
            )
        return np.asarray(least)

    def by_position(self, quantity: int) -> Floats:
        """The least that a module takes, or stores, for a position, in any micro-batch: `[kinds]`."""
        positions = np.maximum(self.tables.inputs[:, None] + self.tables.targets, 1) * self.tables.sizes[:, None, None]
        least = (self.values[:, quantity] / positions).min(axis=(1, 2, 3))
        if self.packed is not None:
            least = np.minimum(least, self._row_by_position(quantity))
        return np.asarray(least)

    def share(
        self,
        quantity: int,
        inputs: IntArray,
        targets: IntArray,
        most: float = np.inf,
        charged: tuple[int, int] = (1, 1),
        fixed: Floats | float = 0.0,
    ) -> Floats:
        """The least share of a sample of these positions in a micro-batch of at most so many: `[samples, kinds]`.

        A measured row's positions are `charged` to its samples by inputs' and targets' positions together, or by one.
        `fixed` is what the micro-batch pays by itself, at most the least that any costs.
        """
        costs = _at(self.values[:, quantity], self.tables.inputs, self.tables.targets, inputs, targets)
        costs = costs - np.asarray(fixed)[..., None]
        largest = np.maximum(most / np.maximum(inputs + targets, 1), 1)  # size of a micro-batch of them alone
        least = _least_share(costs, self.tables.sizes, largest)
        if self.packed is not None:
            attention = _at(self.attention[:, quantity], self.packed.inputs, self.packed.targets, inputs, targets)
            positions = charged[0] * inputs + charged[1] * targets
            by_position = self._row_by_position(quantity, most, charged, fixed)
            least = np.minimum(least, by_position * positions[:, None] + attention)
        return np.asarray(least)

    def _linear(self, quantity: int) -> Floats:
        """Costs of measured rows, apart from attention: `[kinds, row inputs, row targets]`."""
        assert self.packed is not None, "asked where rows were measured"
        linear = np.where(self.packed.linear == ABSENT, np.inf, self.packed.linear)
        return np.asarray(linear[:, :2].sum(axis=1) if quantity == BOTH else linear[:, quantity])

    def _row_by_position(
        self,
        quantity: int,
        most: float = np.inf,
        charged: tuple[int, int] = (1, 1),
        fixed: Floats | float = 0.0,
    ) -> Floats:
        """The least cost of a position of measured rows, apart from attention: `[kinds]`."""
        assert self.packed is not None, "asked where rows were measured"
        inputs = self.packed.row_inputs
        targets = self.packed.row_targets
        costs = self._linear(quantity) - np.asarray(fixed)[..., None, None]
        if len(targets) == 1 and targets[0] == 0 and inputs[-1] > 0:
            of_rows = inputs > 0
            sizes = charged[0] * inputs[of_rows]
            return np.asarray(_least_share(costs[None, :, of_rows, 0], sizes, np.full(1, max(most, sizes[0])))[0])
        smaller = np.pad(np.maximum(inputs[:, None] + targets, 1)[:-1, :-1], ((1, 0), (1, 0)))
        by_position = costs / np.maximum(charged[0] * inputs[:, None] + charged[1] * targets, 1)
        return np.asarray(np.where(smaller > most, np.inf, by_position).min(axis=(1, 2)))

    def times(self, inputs: IntArray, targets: IntArray, *, cut: bool, most: float = np.inf) -> Floats:
        """The least time of a sample, forward and backward, whole or in any pieces: `[samples, kinds]`."""
        passes = (Quantity.FORWARD, Quantity.BACKWARD)
        return np.asarray(sum(self.pass_time(one, inputs, targets, cut=cut, most=most) for one in passes))

    def pass_time(
        self,
        quantity: Quantity,
        inputs: IntArray,
        targets: IntArray,
        *,
        cut: bool,
        most: float = np.inf,
        fixed: Floats | float = 0.0,
    ) -> Floats:
        """The least time of a sample's forward or backward passes, likewise; `fixed` as in `share`."""
        whole = self.share(quantity, inputs, targets, most, fixed=fixed)
        if not cut:
            return whole
        axes = [self.tables.inputs, *([] if self.packed is None else [self.packed.inputs])]
        ends = np.unique(np.concatenate([axis[axis > 0] for axis in axes]))
        fitting = np.searchsorted(ends, inputs, side="right") - 1
        half = self._half_pairs(quantity)  # pieces of x positions attend to (n² - Σ x²) / 2 pairs of earlier ones
        pieces = self.share(quantity, ends, np.zeros_like(ends), most, fixed=fixed)
        by_position = np.minimum.accumulate(pieces / ends[:, None] - half * ends[:, None], axis=0)
        least = half * inputs[:, None] ** 2 + inputs[:, None] * by_position[np.maximum(fitting, 0)]
        return np.asarray(np.where((fitting >= 0)[:, None], np.minimum(whole, least), whole))

    def _half_pairs(self, quantity: Quantity) -> Floats:
        """Half of what a pair of positions of one sample costs, as far as it grows with both: `[kinds]`."""
        _, _, pair, unit = prefix_costs(self.tables)[PREFIX_QUANTITIES.index(quantity)]
        half = np.zeros(len(self.tables.kinds))
        half[0] = pair / unit / 2
        return half


def _least_share(costs: Floats, sizes: IntArray, largest: Floats) -> Floats:
    """The least of cost / size over sizes of at most `largest`: of `[samples, kinds, sizes]`, `[samples, kinds]`.

    Costs are linear between two sizes, so that the least is that of a size of the grid, or of the largest itself.
    """
    at = np.clip(largest, sizes[0], sizes[-1])
    high = np.searchsorted(sizes, at)
    low = np.maximum(high - 1, 0)
    rows = np.arange(len(costs))
    part = ((at - sizes[low]) / np.maximum(sizes[high] - sizes[low], 1))[:, None]
    at_low = np.where(part < 1, costs[rows, :, low], 0.0)
    at_high = np.where(part > 0, costs[rows, :, high], 0.0)
    at_largest = (at_low * (1 - part) + at_high * part) / at[:, None]
    shares = np.where(sizes > at[:, None, None], np.inf, costs / sizes)
    return np.asarray(np.minimum(shares.min(axis=2), at_largest))


def _never_falling(values: IntArray) -> Floats:
    """The least over all lengths from each on, infinite where nothing is known of any: `[kinds, BOTH + 1, …]`."""
    costs = np.where(values == ABSENT, np.inf, values.astype(np.float64))
    backward, weight = costs[:, Quantity.BACKWARD], costs[:, Quantity.WEIGHT]
    rest = np.where(np.isfinite(backward), 0.0, np.inf)
    np.subtract(backward, weight, out=rest, where=np.isfinite(backward) & np.isfinite(weight))
    costs = np.concatenate([costs, rest[:, None]], axis=1)
    for axis in (-2, -1):
        costs = np.flip(np.minimum.accumulate(np.flip(costs, axis), axis), axis)
    both = costs[:, Quantity.FORWARD] + costs[:, Quantity.BACKWARD]
    return np.concatenate([costs, both[:, None]], axis=1)


def _at(values: Floats, first: IntArray, second: IntArray, x: IntArray, y: IntArray) -> Floats:
    """Values of `[…, first, second]` at queries (x, y): `[queries, …]`, infinite above the axes."""
    along, rows = np.moveaxis(values, (-1, -2), (0, 1))[:, None], np.arange(len(x))  # [second, 1, first, …]
    for axis, at, row in ((second, y, 0 * rows), (first, x, rows)):
        inside = np.clip(at, axis[0], axis[-1])
        low = np.maximum(np.searchsorted(axis, inside, side="right") - 1, 0)
        high = np.minimum(low + 1, len(axis) - 1)
        part = (inside - axis[low]) / np.maximum(axis[high] - axis[low], 1)
        below, above = along[low, row], along[high, row]
        weight = part.reshape(-1, *[1] * (below.ndim - 1))
        along = np.where(weight > 0, below * (1 - weight) + np.where(weight > 0, above, 0) * weight, below)
        along = np.moveaxis(along, 1, 0) if row is not rows else along  # [first, queries, …]
    outside = ((x > first[-1]) | (y > second[-1])).reshape(-1, *[1] * (along.ndim - 1))
    return np.where(outside, np.inf, along)
