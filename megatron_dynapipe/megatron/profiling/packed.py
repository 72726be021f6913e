"""Measuring packed rows: a few of different totals and lengths for every layer and mode, and the tables fitted to them.

The head has no attention: it costs a packed row what it costs one padded sample of as many positions.
If targets alone have losses, the head runs a small share of a row's positions, so it is measured with as few.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, Recompute, Shape, round_up
from megatron_dynapipe.costing.tabulate import FEWEST_ROWS as FEWEST_TO_FIT
from megatron_dynapipe.costing.tabulate import PartTables, RowSample, fit_part, row_terms
from megatron_dynapipe.megatron.profiling.layers import Forward, Lengths, MeasuredModule
from megatron_dynapipe.megatron.profiling.measure import Scope, Values, at_once, communicable, measured_by_ranks

LONGEST_ROW = 4096
SHARES = (16, 4, 1)
"""Positions of the longest rows that are measured, and into how many of the others these could be cut."""
FEW = 64
"""The part of the longest rows' positions that are the head's fewest."""
LENGTHS = (16, 64, 256)
"""Positions of their samples, and the longest that a run may have."""
RATIOS = (1, 2, 8)
"""Ratios of inputs to targets, in a decoder's rows."""
SPREAD = 2.0
"""Samples are up to so many times shorter or longer than the length that a row is of. No two are alike, nor are a
sample's input and target: equal ones attend in fewer calls than a run's, and pad less."""
_STEPS = ((math.sqrt(5) - 1) / 2, math.sqrt(2) - 1)
"""Of inputs and of targets, by which the logarithms of lengths go round evenly (Weyl's sequence)."""

_POSITIONS_OF_A_ROW = 512
"""A row's measurement takes about as long as this many positions more."""
FEWEST_ROWS = 8
"""Of a part and mode that are measured at least, also beyond the budget; a decoder's six coefficients want them."""
_RIDGE = 1e-4

Tables = dict[str, dict[str, PartTables]]
"""[quantity][part] as in the cost model file."""


Row = tuple[Lengths, Lengths]
"""A packed row to measure: positions of its samples' inputs, and of their targets."""
MeasuredRows = Mapping[tuple[str, Recompute | None], Sequence[tuple[Row, Values]]]
"""Rows of a part under a mode, the head's under none, with what one layer took."""


def rows_of(part: str, within: Shape, most_positions: int) -> list[Row]:
    """The rows that a part may be measured with, the most telling first."""
    longest = within.input_length
    pairs = {(length, max(length // ratio, 1)) for length in (*LENGTHS, longest) for ratio in RATIOS}
    rows = set()
    shares = (FEW, *SHARES) if part == "postprocess" else SHARES
    for total in (min(LONGEST_ROW, most_positions) // share for share in shares):
        for length, target in pairs:
            if part != "decoder":
                target = 0
            elif target > within.target_length:
                continue
            count = total // (length + target)
            if length <= longest and count:
                inputs = _spread(length, count, longest, _STEPS[0])
                rows.add((inputs, _spread(target, count, within.target_length, _STEPS[1])))
    return _most_telling_first(sorted(rows, key=_positions))


def _positions(row: Row) -> int:
    return sum(map(sum, row))


def _most_telling_first(rows: Sequence[Row]) -> list[Row]:
    """In an order in which the next narrows the fit's coefficients most for the time it takes (D-optimal design)."""
    costs = np.array([_POSITIONS_OF_A_ROW + _positions(row) for row in rows], float)
    terms = np.array([row_terms(*row) for row in rows]) / costs[:, None]
    terms /= terms.max(axis=0)
    known = np.eye(terms.shape[1]) * _RIDGE
    left = list(range(len(rows)))
    order = []
    while left:
        gains = np.einsum("ij,jk,ik->i", terms[left], np.linalg.inv(known), terms[left])
        best = left[int(np.argmax(np.log1p(gains) / costs[left]))]
        known += np.outer(terms[best], terms[best])
        left.remove(best)
        order.append(rows[best])
    return order


def _spread(length: int, count: int, longest: int, step: float) -> Lengths:
    if not length:
        return ()
    places = ((n + 1) * step % 1 for n in range(count))
    return tuple(min(max(round(length * SPREAD ** (2 * place - 1)), 1), longest) for place in places)


def measure_rows(scope: Scope, budget_s: float) -> MeasuredRows:
    """Measure the rows that the budget allows, and `FEWEST_ROWS` of each part and mode at least.

    Empty where even these do not fit into the device's memory.
    """
    end = time.monotonic() + budget_s
    left = {place: rows_of(place[0], scope.within, scope.most_positions) for place in _places(scope)}
    measured: dict[_Place, list[tuple[Row, Values]]] = {place: [] for place in left}
    turns = itertools.count()
    for done in itertools.count():
        open_ = [place for place, rows in left.items() if rows]
        if not open_ or (done >= FEWEST_ROWS and not _all_go_on(end)):
            break
        for places in itertools.batched(open_, at_once(shared=scope.shared)):
            rows = [left[place].pop(0) for place in places]
            measures = [partial(_values, scope, *pair) for pair in zip(places, rows, strict=True)]
            results = measured_by_ranks(measures, turn=next(turns), shared=scope.shared)
            for place, row, values in zip(places, rows, results, strict=True):
                if values is None:  # nor do others that are as long fit
                    left[place] = [other for other in left[place] if _positions(other) < _positions(row)]
                else:
                    measured[place].append((row, values))
    return measured if all(len(rows) >= FEWEST_TO_FIT for rows in measured.values()) else {}


def row_tables(scope: Scope, measured: MeasuredRows, mode: Recompute) -> Tables:
    """The tables of a mode, from what `measure_rows` returned."""
    tables: Tables = {"time_ms": {}, "stored_activation_mb": {}, "peak_activation_mb": {}}
    for (name, place_mode), rows in measured.items():
        if place_mode not in (mode, None):
            continue
        attends = scope.parts[name].prepare_row is not None
        quantities = (
            ("time_ms", f"{name}.forward", NS_PER_MS, attends),
            ("time_ms", f"{name}.backward", NS_PER_MS, attends),
            ("stored_activation_mb", name, BYTES_PER_MB, attends),
            ("peak_activation_mb", name, BYTES_PER_MB, False),  # of one sample at a time, not of all
        )
        for index, (quantity, key, unit, adds_up) in enumerate(quantities):
            samples = [RowSample(*row, values[index] / unit) for row, values in rows]
            tables[quantity][key] = fit_part(samples, scope.within, attends=adds_up)
    return tables


_Place = tuple[str, Recompute | None]


def _places(scope: Scope) -> Iterator[_Place]:
    """The parts that are measured by themselves: layers under every mode; the head recomputes nothing."""
    for name, part in scope.parts.items():
        yield from ((name, mode) for mode in (scope.modes if part.prepare_row is not None else (None,)))


def _values(scope: Scope, place: _Place, row: Row) -> Values | None:
    name, mode = place
    if mode is not None:
        scope.parts[name].set_recompute(mode)
    return scope.measure(of_row(scope.parts[name], row), ())


def of_row(part: MeasuredModule, row: Row) -> MeasuredModule:
    """The part with the forward of a packed row, whatever the point."""

    def forward(of: MeasuredModule, _point: object) -> Forward:
        if of.prepare_row is not None:
            return of.prepare_row(*row)
        return of.prepare((1, round_up(sum(row[0]))))

    alone = None if part.alone is None else replace(part.alone, prepare=partial(forward, part.alone))
    return replace(part, prepare=partial(forward, part), alone=alone)


def _all_go_on(end: float) -> bool:
    """Whether there is time left, by rank 0's clock."""
    left = torch.tensor([time.monotonic() < end], dtype=torch.int64, device=communicable())
    dist.broadcast(left, 0)
    return bool(left.item())
