"""Cost model files (`dynapipe-cost-model/1`): measured tables, read strictly.

Times are in ms, memory in MB (1e6 bytes), tables keyed "<length>" or "<input length>,<target length>" with rows
`[micro-batch size, value]`. A point that is absent ran out of memory when it was measured.
"""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.tables import ABSENT, LARGEST, IntArray, LayerState, LayerTables, Row, increasing
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS, ModelFamily, Recompute

FORMAT = "dynapipe-cost-model/1"

_NonNegative = Annotated[float, msgspec.Meta(ge=0)]
_Table = dict[str, list[tuple[Annotated[int, msgspec.Meta(ge=1)], float]]]
_Points = dict[tuple[int, ...], float]

_TIME_PARTS = {
    "encoder.forward": Row.ENCODER_FORWARD,
    "encoder.backward": Row.ENCODER_BACKWARD,
    "decoder.forward": Row.DECODER_FORWARD,
    "decoder.backward": Row.DECODER_BACKWARD,
    "postprocess.forward": Row.HEAD_FORWARD,
    "postprocess.backward": Row.HEAD_BACKWARD,
}
_STORED_PARTS = {"encoder": Row.ENCODER_STORED, "decoder": Row.DECODER_STORED}
_PEAK_PARTS = {"encoder": Row.ENCODER_PEAK, "decoder": Row.DECODER_PEAK}
_GPT_ROWS = frozenset(row for row in Row if not row.name.startswith("DECODER"))


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One (tensor parallelism, recompute) combination of the file."""

    tp: Annotated[int, msgspec.Meta(ge=1)]
    recompute: Recompute
    model_state_mb: dict[Literal["embedding", "encoder", "decoder"], _NonNegative]
    time_ms: dict[str, _Table]
    stored_activation_mb: dict[str, _Table]
    peak_activation_mb: dict[str, _Table]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    name: str
    source: str
    device: str
    units: dict[str, str]
    model: dict[str, msgspec.Raw]
    keys: Annotated[dict[str, _Entry], msgspec.Meta(min_length=1)]


class TableCostModel:
    """Costs measured on a device, interpolated inside the measured grid and infeasible outside it.

    Below the smallest measured length, that length's cost is taken, an upper bound.
    """

    def __init__(self, file: _File, *, digest: str) -> None:
        self._file = file
        self._tables: dict[str, LayerTables] = {}
        self.name = file.name
        self.digest = digest
        with_decoder = {"decoder" in entry.model_state_mb for entry in file.keys.values()}
        if len(with_decoder) != 1:
            raise CostModelError(f"cost model {file.name}: only some of its keys have decoder layers")
        self.family = ModelFamily.T5 if with_decoder.pop() else ModelFamily.GPT

    @classmethod
    def load(cls, path: Path) -> "TableCostModel":
        """Read a cost model file.

        Raises:
            CostModelError: the file is missing, not of this format, or holds a value that cannot be a cost.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CostModelError(f"cannot read the cost model {path}: {error.strerror}") from error
        return cls.decode(data, origin=str(path))

    @classmethod
    def decode(cls, data: bytes, *, origin: str = "cost model") -> "TableCostModel":
        """Read the bytes of a cost model file; raises as `load`, naming `origin`."""
        try:
            file = msgspec.json.decode(data, type=_File)
        except msgspec.DecodeError as error:
            raise CostModelError(f"{origin} is not a cost model file: {error}") from error
        if file.format != FORMAT:
            raise CostModelError(f"{origin}: expected format {FORMAT!r}, got {file.format!r}")
        for key, entry in file.keys.items():
            if key != (expected := f"tp{entry.tp}_{entry.recompute}"):
                raise CostModelError(f"{origin}: key {key!r} holds the tables of {expected!r}")
        model = cls(file, digest=hashlib.blake2b(data, digest_size=16).hexdigest())
        for entry in file.keys.values():  # A damaged table is found when the file is read, not when training needs it.
            model.tables(tensor_parallel=entry.tp, recompute=entry.recompute)
        return model

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> LayerTables:
        """See `CostModel.tables`."""
        key = f"tp{tensor_parallel}_{recompute}"
        if key not in self._file.keys:
            raise CostModelError(
                f"cost model {self.name} has no table for tensor parallelism {tensor_parallel} with recompute"
                f" {recompute}; it has {', '.join(sorted(self._file.keys))}",
                hint="choose one of those, or profile the one you need",
            )
        if key not in self._tables:
            where = f"cost model {self.name}, key {key}"
            self._tables[key] = _layer_tables(self._file.keys[key], self.family, where)
        return self._tables[key]


def _layer_tables(entry: _Entry, family: ModelFamily, where: str) -> LayerTables:
    """Put all tables of one key on one grid: the union of their axes, which leaves their interpolation unchanged."""
    t5 = family is ModelFamily.T5
    points: dict[Row, _Points] = {}
    for kind, tables, parts in (
        ("time_ms", entry.time_ms, _TIME_PARTS),
        ("stored_activation_mb", entry.stored_activation_mb, _STORED_PARTS),
        ("peak_activation_mb", entry.peak_activation_mb, _PEAK_PARTS),
    ):
        wanted = {part: row for part, row in parts.items() if t5 or row in _GPT_ROWS}
        if set(tables) != set(wanted):
            raise CostModelError(f"{where}: expected {kind} of {sorted(wanted)}, got {sorted(tables)}")
        for part, row in wanted.items():
            lengths = 2 if row.name.startswith("DECODER") else 1
            points[row] = _read_points(tables[part], lengths, f"{where}, {kind}.{part}")

    head = (Row.HEAD_FORWARD, Row.HEAD_BACKWARD)
    sizes = increasing([point[0] for table in points.values() for point in table])
    by_input = [table for row, table in points.items() if not (t5 and row in head)]
    inputs = increasing([point[1] for table in by_input for point in table])
    by_target = [points[row] for row in (*head, Row.DECODER_FORWARD) if t5]
    targets = increasing([point[-1] for table in by_target for point in table] or [0])

    values = np.zeros((len(Row), len(sizes), len(inputs), len(targets)), np.int64)
    for row, table in points.items():
        scale = NS_PER_MS if "FORWARD" in row.name or "BACKWARD" in row.name else BYTES_PER_MB
        if row.name.startswith("DECODER"):
            values[row] = _resample(table, (sizes, inputs, targets), scale)
        elif t5 and row in head:
            values[row] = _resample(table, (sizes, targets), scale)[:, None, :]
        else:
            values[row] = _resample(table, (sizes, inputs), scale)[:, :, None]
    values[:, (values == ABSENT).any(axis=0)] = ABSENT
    state = {kind: round(mb * BYTES_PER_MB) for kind, mb in entry.model_state_mb.items()}
    if missing := {"embedding", "encoder"} - state.keys():
        raise CostModelError(f"{where}: model_state_mb lacks {sorted(missing)}")
    return LayerTables(
        sizes=sizes,
        inputs=inputs,
        targets=targets,
        values=values,
        state=LayerState(
            embedding_bytes=state["embedding"],
            encoder_bytes=state["encoder"],
            decoder_bytes=state.get("decoder", 0),
        ),
    )


def _read_points(table: _Table, lengths: int, where: str) -> _Points:
    """{(size, *lengths): value}; where a point was measured more than once, the last one counts."""
    points: _Points = {}
    for key, rows in table.items():
        try:
            point = tuple(int(part) for part in key.split(","))
        except ValueError:
            point = ()
        if len(point) != lengths or min(point) < 1:
            raise CostModelError(f"{where}: expected keys of {lengths} positive length(s), got {key!r}")
        for size, value in rows:
            if not (math.isfinite(value) and 0 <= value * NS_PER_MS <= LARGEST):
                raise CostModelError(
                    f"{where}: expected a cost of 0 or more at length {key}, size {size}, got {value}",
                    hint="profile again; a cost cannot be negative, infinite or not a number",
                )
            points[(size, *point)] = value
    if not points:
        raise CostModelError(f"{where}: the table is empty")
    return points


def _resample(points: _Points, axes: tuple[IntArray, ...], scale: int) -> IntArray:
    """The table's values at every point of `axes`, in integers of 1/scale; `ABSENT` where it cannot tell.

    `axes` hold the table's own grid and more. Along each dimension in turn a new grid point takes the weighted mean of
    the two around it (of multilinear interpolation nothing else is left there), or `ABSENT` with either of them.
    """
    own = [increasing([point[d] for point in points]) for d in range(len(axes))]
    dense = np.full([len(axis) for axis in own], np.nan)
    for point, value in points.items():
        dense[tuple(int(np.searchsorted(axis, x)) for axis, x in zip(own, point, strict=True))] = value
    for d, (axis, wanted) in enumerate(zip(own, axes, strict=True)):
        dense = np.moveaxis(_along_first(np.moveaxis(dense, d, 0), axis, wanted), 0, d)
    scaled = np.where(np.isnan(dense), ABSENT, np.rint(dense * scale))
    return np.asarray(scaled, np.int64)


def _along_first(dense: npt.NDArray[np.float64], axis: IntArray, wanted: IntArray) -> npt.NDArray[np.float64]:
    clamped = np.maximum(wanted, axis[0])
    low = np.minimum(np.searchsorted(axis, clamped, side="right") - 1, len(axis) - 1)
    high = np.minimum(low + 1, len(axis) - 1)
    part = (clamped - axis[low]) / np.maximum(axis[high] - axis[low], 1)
    part = part.reshape((-1,) + (1,) * (dense.ndim - 1))
    mixed = np.where(part == 0, dense[low], (1 - part) * dense[low] + part * dense[high])
    mixed[wanted > axis[-1]] = np.nan
    return np.asarray(mixed, np.float64)
