"""Measuring packed rows: a few of different totals and lengths for every layer and mode, and the tables fitted to them.

Embedding and head have no attention: they cost a packed row what they cost one padded sample of as many positions.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_dynapipe.cost.fit_packed import PartTables, RowSample, fit_part
from megatron_dynapipe.cost.tabulate import Range
from megatron_dynapipe.integration.profiling.layers import Forward, Lengths, Part
from megatron_dynapipe.integration.profiling.measure import Sample, measure
from megatron_dynapipe.integration.profiling.profiler import communicable, over_ranks
from megatron_dynapipe.runtime.platform import DevicePlatform
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS, Recompute

LONGEST_ROW, SHARES = 4096, (16, 4, 1)
"""Positions of the longest rows that are measured, and into how many of the others these could be cut."""
LENGTHS = (16, 64, 256)
"""Positions of their samples, and the longest that a run may have."""
RATIOS = (1, 2, 8)
"""Of inputs to targets, in a decoder's rows."""
SPREAD = (0.75, 1.25)
"""Samples of a row are in turn shorter and longer: equal ones are faster than a run's."""

Tables = dict[str, dict[str, PartTables]]
"""[quantity][part] as in the cost model file."""


class Row(NamedTuple):
    """A packed row to measure."""

    inputs: Lengths
    targets: Lengths


def rows_of(part: str, within: Range, most_positions: int) -> list[Row]:
    """The rows that a part is measured with, the smallest first."""
    longest = within.input_length
    pairs = {(length, max(length // ratio, 1)) for length in (*LENGTHS, longest) for ratio in RATIOS}
    rows = set()
    for total in (min(LONGEST_ROW, most_positions) // share for share in SHARES):
        for length, target in pairs:
            if part != "decoder":
                target = 0
            elif target > within.target_length:
                continue
            count = total // (length + target)
            if length <= longest and count:
                rows.add(Row(_spread(length, count, longest), _spread(target, count, within.target_length)))
    return sorted(rows, key=lambda row: sum(row.inputs) + sum(row.targets))


def _spread(length: int, count: int, longest: int) -> Lengths:
    if not length:
        return ()
    return tuple(min(max(round(length * SPREAD[n % len(SPREAD)]), 1), longest) for n in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedProfiler:
    """Measures the packed rows of all layers.

    Attributes:
        parts: what is measured, by name.
        modes: recompute modes of the layers.
        within: the micro-batches that a run may ask for.
        most_positions: of one row that is measured.
        platform: the device's clock.
        shared: whether ranks share the layers.
    """

    parts: Mapping[str, Part]
    modes: Sequence[Recompute]
    within: Range
    most_positions: int
    platform: DevicePlatform
    shared: bool

    def run(self, budget_s: float) -> dict[Recompute, Tables]:
        """Tables by mode; empty where the budget ends before all rows are measured."""
        end, tables = time.monotonic() + budget_s, {}
        for mode in self.modes:
            measured = {name: list(self._rows(name, mode, end)) for name in self.parts if name != "embedding"}
            if any(len(rows) < len(self._wanted(name)) for name, rows in measured.items()):
                return {}
            tables[mode] = self._tables(measured)
        return tables

    def _wanted(self, name: str) -> list[Row]:
        return rows_of(name, self.within, self.most_positions)

    def _rows(self, name: str, mode: Recompute, end: float) -> Iterator[tuple[Row, tuple[int, ...]]]:
        """Rows with forward and backward ns, stored and peak bytes, until one does not fit or time is up."""
        part = self.parts[name]
        if part.prepare_row is not None:
            part.set_recompute(mode)
        for row in self._wanted(name):
            if not _all_go_on(end):
                return
            values = over_ranks(self._measure(part, row))
            if values is None:
                return
            yield row, values

    def _measure(self, part: Part, row: Row) -> Sample | None:
        def prepare(_point: object) -> Forward:
            if part.prepare_row is not None:
                return part.prepare_row(*row)
            return part.prepare((1, -(-sum(row.inputs) // 8) * 8))

        try:
            return measure(replace(part, prepare=prepare), (), self.platform, shared=self.shared)
        except torch.OutOfMemoryError:
            return None

    def _tables(self, measured: Mapping[str, Sequence[tuple[Row, tuple[int, ...]]]]) -> Tables:
        tables: Tables = {"time_ms": {}, "stored_activation_mb": {}, "peak_activation_mb": {}}
        for name, rows in measured.items():
            attends = self.parts[name].prepare_row is not None
            quantities = (
                ("time_ms", f"{name}.forward", NS_PER_MS, attends),
                ("time_ms", f"{name}.backward", NS_PER_MS, attends),
                ("stored_activation_mb", name, BYTES_PER_MB, attends),
                ("peak_activation_mb", name, BYTES_PER_MB, False),  # of one sample at a time, not of all
            )
            for index, (quantity, key, unit, adds_up) in enumerate(quantities):
                samples = [RowSample(row.inputs, row.targets, values[index] / unit) for row, values in rows]
                tables[quantity][key] = fit_part(samples, self.within, attends=adds_up)
        return tables


def _all_go_on(end: float) -> bool:
    """Whether there is time left, by rank 0's clock."""
    left = torch.tensor([time.monotonic() < end], dtype=torch.int64, device=communicable())
    dist.broadcast(left, 0)
    return bool(left.item())
