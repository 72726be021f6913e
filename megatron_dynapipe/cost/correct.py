"""Correcting a cost model by passes that were measured while training, and writing the result as a file.

A pass of a stage is predicted as a sum over its layers and the head. A correction scales each kind of them and adds a
constant per layer, for what a layer's own profile does not see (loading, hooks, an emptier cache):

    measured ≈ Σ layers · (scale · table + offset) + head scale · head table

Scales and offsets are integers, applied in integers, so that a corrected model is the same wherever it is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from megatron_dynapipe.cost.format import UNITS, CostEntry, CostFile, Link, Points, key_of, to_table
from megatron_dynapipe.cost.layout import PipelineLayout
from megatron_dynapipe.cost.nnls import nonnegative_least_squares
from megatron_dynapipe.cost.packed import packed_layer_costs
from megatron_dynapipe.cost.surface import Floats
from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerTables, Row
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS, ModelFamily, Recompute, Shape

UNIT = 1000
"""Scales are in thousandths."""

_FORWARD = (Row.ENCODER_FORWARD, Row.DECODER_FORWARD, Row.HEAD_FORWARD)
_BACKWARD = (Row.ENCODER_BACKWARD, Row.DECODER_BACKWARD, Row.HEAD_BACKWARD)
_PULL = 0.05
"""Weight with which a scale is held to the common one, against that of one measured pass per kind."""
_ROBUST_STEPS = 6
_LEAST_SCALE = 0.05


class PassSample(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One micro-batch's passes on one virtual stage, as measured; 0 where a pass was not run.

    Of a packed row, `inputs` and `targets` are the positions of its samples; padded micro-batches have none.
    """

    stage: int
    shape: Shape
    recompute: Recompute
    forward_ns: int
    backward_ns: int
    inputs: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Scale (in thousandths) of every row of times, and what is added per layer of a forward and of a backward."""

    scales: Mapping[Row, int]
    forward_offset_ns: int
    backward_offset_ns: int


def fit_correction(
    samples: Sequence[PassSample], tables: Mapping[Recompute, LayerTables], layout: PipelineLayout
) -> Correction:
    """The correction that explains the measured passes best.

    Args:
        samples: of any stages.
        tables: the model to be corrected, under every recompute mode of the samples.
        layout: layers per virtual stage.

    Raises:
        CostModelError: no sample can be used, or one has a recompute mode or a stage that the run does not have.
    """
    if unknown := {sample.recompute for sample in samples} - tables.keys():
        raise CostModelError(f"passes were measured under recompute {sorted(unknown)}, which the model does not have")
    if samples and max(sample.stage for sample in samples) >= layout.virtual_stages:
        raise CostModelError(f"expected passes of {layout.virtual_stages} virtual stages, got more")
    predicted = np.array([_unit_costs(sample, tables[sample.recompute]) for sample in samples]).reshape(-1, len(Row))
    forward = _fit(samples, predicted, layout, _FORWARD, [sample.forward_ns for sample in samples])
    backward = _fit(samples, predicted, layout, _BACKWARD, [sample.backward_ns for sample in samples])
    scales = dict(zip((*_FORWARD, *_BACKWARD), (*forward[0], *backward[0]), strict=True))
    return Correction(scales=scales, forward_offset_ns=forward[1], backward_offset_ns=backward[1])


def corrected(tables: LayerTables, correction: Correction) -> LayerTables:
    """The grid under a correction; memory and what is infeasible stay as they are.

    Costs of packed rows are derived from the corrected grid, whatever they were before.
    """
    values = tables.values.copy()
    for row, scale in correction.scales.items():
        values[row] = (values[row] * scale + UNIT // 2) // UNIT
    rows = [(Row.ENCODER_FORWARD, correction.forward_offset_ns), (Row.ENCODER_BACKWARD, correction.backward_offset_ns)]
    if tables.state.decoder_bytes:
        rows += [(Row.DECODER_FORWARD, correction.forward_offset_ns)]
        rows += [(Row.DECODER_BACKWARD, correction.backward_offset_ns)]
    for row, offset in rows:
        values[row] += offset
    values[:, tables.values[0] == ABSENT] = ABSENT
    return replace(tables, values=values, separate=None, packed=None)


def as_file(
    tables: Mapping[tuple[int, Recompute], LayerTables],
    family: ModelFamily,
    *,
    name: str,
    source: str,
    device: str,
    provenance: Mapping[str, str | int | float | bool],
    links: Mapping[str, Link] | None = None,
) -> CostFile:
    """Grids as a cost model file, which reads back as exactly the same grids."""
    entries = {
        key_of(tp, mode): _entry(tp, mode, grid, t5=family is ModelFamily.T5) for (tp, mode), grid in tables.items()
    }
    return CostFile(
        name=name,
        source=source,
        device=device,
        units=UNITS,
        model={},
        keys=entries,
        provenance=dict(provenance),
        links=dict(links or {}),
        peak_covers_backward=any(grid.peak_covers_backward for grid in tables.values()),
    )


def _unit_costs(sample: PassSample, tables: LayerTables) -> IntArray:
    """One layer of each kind and the head, for a sample's shape: `[len(Row)]`.

    A packed row's are those derived from the grid, since it is the grid that is corrected.
    """
    if sample.inputs:
        lengths = np.array(sample.inputs, np.int64), np.array(sample.targets, np.int64)
        found = packed_layer_costs(replace(tables, packed=None), *lengths)
        return np.full(len(Row), ABSENT, np.int64) if found is None else found
    size, inputs, targets = (np.array([n], np.int64) for n in sample.shape)
    return np.asarray(tables.at_sizes(tables.at_lengths(inputs, targets), size)[0])


def _fit(
    samples: Sequence[PassSample],
    predicted: IntArray,
    layout: PipelineLayout,
    rows: Sequence[Row],
    measured_ns: Sequence[int],
) -> tuple[list[int], int]:
    """Scales of the rows in thousandths, and the offset per layer, for forwards or for backwards."""
    measured = np.array(measured_ns, float)
    stage = np.array([sample.stage for sample in samples], np.int64)
    encoder, decoder = np.array(layout.encoder_split)[stage], np.array(layout.decoder_split)[stage]
    head = (stage == layout.virtual_stages - 1).astype(np.int64)
    terms = np.stack([encoder, decoder, head], axis=1) * predicted[:, list(rows)].astype(float)
    usable = (measured > 0) & (terms.sum(axis=1) > 0) & (predicted[:, 0] != ABSENT)
    if not usable.any():
        raise CostModelError("no pass was measured by which the cost model could be corrected")
    measured, terms, layers = measured[usable], terms[usable], (encoder + decoder)[usable]
    common = float(np.median(measured / terms.sum(axis=1)))
    offset_unit = float(np.median(measured / layers))
    columns = np.concatenate([terms * common, (layers * offset_unit)[:, None]], axis=1) / measured[:, None]
    pull = _PULL * np.sqrt(len(measured)) * np.diag([1.0, 1.0, 1.0, 0.3])
    aim = pull @ np.array([1.0, 1.0, 1.0, 0.0])
    solved = np.array([1.0, 1.0, 1.0, 0.0])
    for _ in range(_ROBUST_STEPS):
        weight: Floats = 1 / np.sqrt(np.maximum(np.abs(columns @ solved - 1), 0.02) / 0.02)
        rows_ = np.concatenate([columns * weight[:, None], pull * float(weight.mean())])
        solved = nonnegative_least_squares(rows_, np.concatenate([weight, aim * float(weight.mean())]))
    scales = [round(max(float(multiple), _LEAST_SCALE) * common * UNIT) for multiple in solved[:3]]
    return scales, round(float(solved[3]) * offset_unit)


def _entry(tp: int, mode: Recompute, grid: LayerTables, *, t5: bool) -> CostEntry:
    """A grid's tables; those of fewer dimensions are read off where the others are feasible."""
    tables: dict[str, dict[str, Points]] = {"time_ms": {}, "stored": {}, "peak": {}}
    kinds = [("encoder", "ENCODER", 2), ("decoder", "DECODER", None), ("postprocess", "HEAD", 1)]
    for kind, prefix, along in kinds:
        if kind == "decoder" and not t5:
            continue
        along = 2 if kind == "postprocess" and not t5 else along
        for way in ("forward", "backward"):
            row = Row[f"{prefix}_{way.upper()}"]
            tables["time_ms"][f"{kind}.{way}"] = _points(grid, row, along, NS_PER_MS)
        if grid.values[Row[f"{prefix}_PEAK"]].max() > 0:  # of the head, the base may say nothing
            tables["stored"][kind] = _points(grid, Row[f"{prefix}_STORED"], along, BYTES_PER_MB)
            tables["peak"][kind] = _points(grid, Row[f"{prefix}_PEAK"], along, BYTES_PER_MB)
    if grid.values[Row.ENCODED_STORED].max() > 0:
        tables["stored"]["encoder_output"] = _points(grid, Row.ENCODED_STORED, 2, BYTES_PER_MB)
    state = {"embedding": grid.state.embedding_bytes, "encoder": grid.state.encoder_bytes}
    state |= {"decoder": grid.state.decoder_bytes} if t5 else {}
    written = {which: {part: to_table(points) for part, points in parts.items()} for which, parts in tables.items()}
    return CostEntry(
        tp=tp,
        recompute=mode,
        model_state_mb={kind: size / BYTES_PER_MB for kind, size in state.items()},  # type: ignore[misc]
        time_ms=written["time_ms"],
        stored_activation_mb=written["stored"],
        peak_activation_mb=written["peak"],
    )


def _points(grid: LayerTables, row: Row, along: int | None, per_unit: int) -> Points:
    """A row as points; `along` is the axis of the grid on which it does not depend (None: on all it does)."""
    values = grid.values[row]
    axes = [grid.sizes, grid.inputs, grid.targets]
    if along is not None:
        values = values.max(axis=along)  # ABSENT is below every cost
        axes.pop(along)
    shapes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    return {
        tuple(shape): value / per_unit
        for shape, value in zip(shapes.tolist(), values.reshape(-1).tolist(), strict=True)
        if value != ABSENT
    }
