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
    axes_of,
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

_ONE = np.ones(1, np.int64)


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
    axes = grid.sizes, grid.inputs, grid.targets
    padded = {
        quantity: {part: to_table(_known(grid.values[row], axes, row, family)) for part, row in rows.items()}
        for quantity, rows in parts.items()
    }
    packed = None
    if grid.packed is not None:
        own = grid.packed
        packed = PackedEntry(division=dict(own.division), **{
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
        **padded,  # type: ignore[arg-type]  # the parts by name
    )


def _parts(grid: LayerTables, quantity: str, family: ModelFamily) -> dict[str, Row]:
    """The parts of a quantity that the grid's model has; of the head's memory and the encoder's output, if it knows."""
    t5 = family is ModelFamily.T5
    others = {"expert" if t5 else "decoder", *([] if t5 or grid.state.decoder_bytes else ["expert"])}
    rows = {part: row for part, row in PARTS[quantity].items() if part.split(".")[0] not in others}
    known = {Row.HEAD_STORED: Row.HEAD_PEAK, Row.HEAD_PEAK: Row.HEAD_PEAK, Row.ENCODED_STORED: Row.ENCODED_STORED}
    return {part: row for part, row in rows.items() if row not in known or grid.values[known[row]].max() > 0}


def _packed_part(grid: PackedTables, row: Row, family: ModelFamily) -> PackedPart:
    """A row of the packed grids; attention only where it costs anything."""
    linear = _known(grid.linear[row][None], (_ONE, grid.row_inputs, grid.row_targets), row, family)
    attention = _known(grid.attention[row][None], (_ONE, grid.inputs, grid.targets), row, family)
    attends = row.name.startswith(("ENCODER_", "DECODER_"))
    prefix = None
    if grid.prefix is not None and row in ENCODER_ROWS:
        once, each, pair = (grid.prefix[ENCODER_ROWS.index(row)] / (unit_of(row) * PREFIX_UNIT)).tolist()
        prefix = once, each, pair
    return PackedPart(
        linear=_by_positions(linear), attention=_by_positions(attention) if attends else {}, prefix=prefix
    )


def _by_positions(points: Points) -> dict[str, float]:
    return {",".join(map(str, point[1:])): value for point, value in sorted(points.items())}


def _known(values: IntArray, axes: tuple[IntArray, ...], row: Row, family: ModelFamily) -> Points:
    """The values `[sizes, inputs, targets]` of a grid that are known, in the unit of files, by its own axes."""
    kept = axes_of(row, family is ModelFamily.T5)
    values = values.max(axis=tuple(d for d in range(3) if d not in kept))  # ABSENT is below every cost
    shapes = np.stack(np.meshgrid(*(axes[d] for d in kept), indexing="ij"), axis=-1).reshape(-1, len(kept))
    return {
        tuple(shape): value / unit_of(row)
        for shape, value in zip(shapes.tolist(), values.reshape(-1).tolist(), strict=True)
        if value != ABSENT
    }
