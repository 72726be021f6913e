"""Writing grids of costs as a cost model file, which reads back as exactly the same grids."""

from collections.abc import Mapping

import msgspec
import numpy as np

from megatron_dynapipe.cost.format import (
    FORMAT,
    PACKED_FORMAT,
    PARTS,
    UNITS,
    CostEntry,
    CostFile,
    Link,
    PackedEntry,
    PackedPart,
    Points,
    key_of,
    to_table,
    unit_of,
)
from megatron_dynapipe.cost.tables import (
    ABSENT,
    ENCODER_ROWS,
    PREFIX_UNIT,
    IntArray,
    LayerTables,
    PackedTables,
    Row,
)
from megatron_dynapipe.units import BYTES_PER_MB, ModelFamily, Recompute


def as_file(
    tables: Mapping[tuple[int, Recompute], LayerTables],
    family: ModelFamily,
    *,
    name: str,
    source: str,
    device: str,
    model: Mapping[str, msgspec.Raw],
    provenance: Mapping[str, str | int | float | bool],
    links: Mapping[str, Link] | None = None,
) -> CostFile:
    """Grids as a cost model file, which reads back as exactly the same grids; `model` as `CostModel.model`."""
    entries = {key_of(tp, mode): _entry(tp, mode, grid, family) for (tp, mode), grid in tables.items()}
    return CostFile(
        format=PACKED_FORMAT if any(entry.packed for entry in entries.values()) else FORMAT,
        name=name,
        source=source,
        device=device,
        units=UNITS,
        model=dict(model),
        keys=entries,
        provenance=dict(provenance),
        links=dict(links or {}),
        peak_covers_backward=any(grid.peak_covers_backward for grid in tables.values()),
    )


def _entry(tp: int, mode: Recompute, grid: LayerTables, family: ModelFamily) -> CostEntry:
    """A grid's tables; those of fewer dimensions are read off where the others are feasible."""
    parts = {quantity: _parts(grid, quantity, family) for quantity in PARTS}
    padded = {
        quantity: {part: to_table(_points(grid, row, family)) for part, row in rows.items()}
        for quantity, rows in parts.items()
    }
    packed = None
    if grid.packed is not None:
        own = grid.packed
        packed = PackedEntry(**{
            quantity: {part: _packed_part(own, row, family) for part, row in rows.items()}
            for quantity, rows in parts.items()
        })  # fmt: skip
    state = {"embedding": grid.state.embedding_bytes, "encoder": grid.state.encoder_bytes}
    if grid.state.decoder_bytes:
        state["decoder" if family is ModelFamily.T5 else "expert"] = grid.state.decoder_bytes
    if grid.state.expert_bytes:
        state["experts"] = grid.state.expert_bytes
    return CostEntry(
        tp=tp,
        recompute=mode,
        model_state_mb={kind: size / BYTES_PER_MB for kind, size in state.items()},  # type: ignore[misc]
        packed=packed,
        expert_parallel=grid.state.expert_parallel,
        division=dict(grid.division),
        time_ms=padded["time_ms"],
        stored_activation_mb=padded["stored_activation_mb"],
        peak_activation_mb=padded["peak_activation_mb"],
    )


def _parts(grid: LayerTables, quantity: str, family: ModelFamily) -> dict[str, Row]:
    """The parts of a quantity that the grid's model has; of the head's memory and the encoder's output, if it knows."""
    t5 = family is ModelFamily.T5
    others = {"expert" if t5 else "decoder", *([] if t5 or grid.state.decoder_bytes else ["expert"])}
    rows = {part: row for part, row in PARTS[quantity].items() if part.split(".")[0] not in others}
    known = {Row.HEAD_STORED: Row.HEAD_PEAK, Row.HEAD_PEAK: Row.HEAD_PEAK, Row.ENCODED_STORED: Row.ENCODED_STORED}
    return {part: row for part, row in rows.items() if row not in known or grid.values[known[row]].max() > 0}


def _independent_of(row: Row, family: ModelFamily) -> int | None:
    """0 or 1 for the lengths, inputs or targets, on which a row does not depend."""
    if row.name.startswith("DECODER") and family is ModelFamily.T5:
        return None
    return 0 if row.name.startswith("HEAD") and family is ModelFamily.T5 else 1


def _points(grid: LayerTables, row: Row, family: ModelFamily) -> Points:
    """A row of the padded grid as points (size, *lengths)."""
    drop = _independent_of(row, family)
    return _known(grid.values[row], (grid.sizes, grid.inputs, grid.targets), None if drop is None else drop + 1, row)


def _packed_part(grid: PackedTables, row: Row, family: ModelFamily) -> PackedPart:
    """A row of the packed grids; attention only where it costs anything."""
    drop = _independent_of(row, family)
    linear = _known(grid.linear[row], (grid.row_inputs, grid.row_targets), drop, row)
    attention = _known(grid.attention[row], (grid.inputs, grid.targets), drop, row)
    attends = row.name.startswith(("ENCODER_", "DECODER_"))
    prefix = None
    if grid.prefix is not None and row in ENCODER_ROWS:
        once, each, pair = (grid.prefix[ENCODER_ROWS.index(row)] / (unit_of(row) * PREFIX_UNIT)).tolist()
        prefix = once, each, pair
    return PackedPart(
        linear=_by_positions(linear), attention=_by_positions(attention) if attends else {}, prefix=prefix
    )


def _by_positions(points: Points) -> dict[str, float]:
    return {",".join(map(str, point)): value for point, value in sorted(points.items())}


def _known(values: IntArray, axes: tuple[IntArray, ...], drop: int | None, row: Row) -> Points:
    """The values of a grid that are known, in the file's unit, without the axis `drop`."""
    if drop is not None:
        values = values.max(axis=drop)  # ABSENT is below every cost
        axes = axes[:drop] + axes[drop + 1 :]
    shapes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    return {
        tuple(shape): value / unit_of(row)
        for shape, value in zip(shapes.tolist(), values.reshape(-1).tolist(), strict=True)
        if value != ABSENT
    }
