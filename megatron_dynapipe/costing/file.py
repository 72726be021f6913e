"""Cost models read from files: tables on one grid, interpolated inside it and infeasible outside."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import (
    ABSENT,
    PREFIX_QUANTITIES,
    PREFIX_UNIT,
    CostTables,
    Division,
    IntArray,
    LayerKind,
    ModelState,
    PackedTables,
    Quantity,
    increasing,
)
from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import BYTES_PER_MB, Recompute
from megatron_dynapipe.costing.adapters import Adapters, described
from megatron_dynapipe.costing.format import (
    PARTS,
    CostEntry,
    CostFile,
    PackedEntry,
    Points,
    axes_of,
    decode_file,
    key_of,
    read_file,
    read_packed,
    read_points,
    unit_of,
)
from megatron_dynapipe.costing.modules import Dividing, Part, kinds_of, parameter_bytes
from megatron_dynapipe.costing.shape import Experts


class TableCostModel:
    """Costs from a file, interpolated inside its grid and infeasible outside it.

    Below the smallest length of the grid, that length's cost is taken, an upper bound.
    """

    def __init__(self, file: CostFile, *, digest: str) -> None:
        self.file = file
        self._tables: dict[str, CostTables] = {}
        self.name = file.name
        self.digest = digest
        self.family = file.family
        self.hidden_size = file.hidden_size
        self.links = file.links

    @classmethod
    def load(cls, path: Path) -> "TableCostModel":
        """Read a cost model file.

        Raises:
            CostModelError: the file is missing, not of this format, or holds a value that cannot be a cost.
        """
        file, data = read_file(path)
        return cls._checked(file, data)

    @classmethod
    def decode(cls, data: bytes, *, origin: str = "cost model") -> "TableCostModel":
        """Read the bytes of a cost model file; raises as `load`, naming `origin`."""
        return cls._checked(decode_file(data, origin=origin), data)

    @classmethod
    def _checked(cls, file: CostFile, data: bytes) -> "TableCostModel":
        model = cls(file, digest=hashlib.blake2b(data, digest_size=16).hexdigest())
        for entry in file.keys.values():  # A damaged table is found when the file is read, not when training needs it.
            model.tables(tensor_parallel=entry.tp, recompute=entry.recompute)
        return model

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        """The costs that the file holds; raises CostModelError where it lacks the combination."""
        key = key_of(tensor_parallel, recompute)
        if key not in self.file.keys:
            raise CostModelError(
                f"cost model {self.name} has no table for tensor parallelism {tensor_parallel} with recompute"
                f" {recompute}; it has {', '.join(sorted(self.file.keys))}",
                hint="choose one of those, or profile the one you need",
            )
        if key not in self._tables:
            where = f"cost model {self.name}, key {key}"
            self._tables[key] = _cost_tables(self.file, self.file.keys[key], where)
        return self._tables[key]


def check_measured_model(file: CostFile, model: Mapping[str, Any], *, tensor_parallel: int | None = None) -> None:
    """Refuse costs that were measured on another model.

    Args:
        file: what it says of its model is compared, where `model` says it too.
        model: fields of `ModelShape`; others are ignored.
        tensor_parallel: where `model["vocabulary"]` has been padded for so many ranks; None where it has not been.

    Raises:
        CostModelError: naming all numbers that differ.
    """
    names = ("hidden", "heads", "query_groups", "kv_channels", "ffn", "vocabulary")
    measured = {name: msgspec.json.decode(file.model[name]) for name in names if name in file.model}
    ranks = max(entry.tp for entry in file.keys.values())
    differ = []
    for name, value in measured.items():
        number = model.get(name)
        if name == "vocabulary" and isinstance(value, int) and isinstance(number, int):
            # Padded numbers are alike if the same number of tokens may be padded to both.
            low = max(value - _VOCABULARY_MULTIPLE * ranks, number - _padding(tensor_parallel))
            high = min(value, number)
            number = value if low < high else number
        if number and value and value != number:
            differ.append(f"{name} {number} in place of the file's {value}")
    experts = model.get("experts")
    recorded = file.model.get("experts")
    if experts is not None and (recorded is None or msgspec.json.decode(recorded, type=Experts) != experts):
        differ.append("experts in place of the file's " + ("others" if recorded else "none"))
    if bool(model.get("eight_bits")) != ("eight_bits" in file.model):
        differ.append("products in eight bits in place of the file's, or the other way round")
    adapters: Adapters | None = model.get("adapters")
    if adapters != file.adapters:
        differ.append(f"{described(adapters)} in place of the file's {described(file.adapters)}")
    if differ:
        raise CostModelError(
            f"{file.name} was measured on another model: this one has {', '.join(differ)}",
            hint="measure this one with `megatron-dynapipe profile`, or compute its costs (--cost-model analytic)",
        )


_VOCABULARY_MULTIPLE = 128
"""Megatron pads a vocabulary to multiples of this, for each tensor-parallel rank."""


def _padding(tensor_parallel: int | None) -> int:
    return 1 if tensor_parallel is None else _VOCABULARY_MULTIPLE * tensor_parallel


_Place = tuple[Part, Quantity]


def _cost_tables(file: CostFile, entry: CostEntry, where: str) -> CostTables:
    has_decoder = "decoder" in entry.kinds
    tables = read_points(entry, entry.kinds, where)
    divisions = entry.division or file.shares_by_flops(entry.recompute)
    grid = _on_one_grid({PARTS[quantity][part]: table for (quantity, part), table in tables.items()}, has_decoder)
    sizes, inputs, targets, layers = grid
    divided = entry.recompute is not Recompute.FULL and file.adapters is None  # frozen weights get no gradients
    dividing = Dividing(
        divisions=divisions, inputs=inputs, targets=targets, weights=divided, sizes=sizes[:, None, None]
    )
    separate = dividing.modules(layers)
    values = separate.copy()
    values[:, :, (values == ABSENT).any(axis=(0, 1))] = ABSENT
    packed = None
    if entry.packed is not None:
        divisions_of_rows = entry.packed.division or divisions
        packed = _packed_tables(entry.packed, tables.keys(), divisions_of_rows, divided, has_decoder, where)
    state = {kind: round(mb * BYTES_PER_MB) for kind, mb in entry.model_state_mb.items()}
    trained = {kind: round(mb * BYTES_PER_MB) for kind, mb in entry.trained_state_mb.items()}
    if missing := {"embedding", "encoder"} - state.keys():
        raise CostModelError(f"{where}: model_state_mb lacks {sorted(missing)}")
    return CostTables(
        kinds=kinds_of(dict.fromkeys(entry.kinds)),
        sizes=sizes,
        inputs=inputs,
        targets=targets,
        values=values,
        state=ModelState(
            modules=parameter_bytes({kind: state[kind] for kind in entry.kinds}, divisions),
            embedding_bytes=state["embedding"],
            expert_bytes=state.get("experts", 0),
            expert_parallel=entry.expert_parallel,
            trained=parameter_bytes(trained, divisions) if trained else None,
        ),
        exchange_bytes=file.exchange_bytes,
        separate=separate,
        packed=packed,
        peak_covers_backward=file.peak_covers_backward,
        key_value_channels=file.key_value_channels // entry.tp,
        division=divisions.get("encoder"),
    )


def _packed_tables(
    entry: PackedEntry,
    parts: Collection[tuple[str, str]],
    divisions: Mapping[LayerKind, Division],
    divided: bool,
    has_decoder: bool,
    where: str,
) -> PackedTables:
    """Put the packed tables of one key on one grid of a row's positions and one of a sample's."""
    points = {PARTS[quantity][part]: both for (quantity, part), both in read_packed(entry, parts, where).items()}
    (_, row_inputs, row_targets, linear), (_, inputs, targets, attention) = (
        _on_one_grid({place: both[which] for place, both in points.items() if both[which]}, has_decoder, like=points)
        for which in range(2)
    )
    if not len(inputs):
        raise CostModelError(f"{where}: packed tables without the attention of samples")
    rows = Dividing(divisions=divisions, inputs=row_inputs, targets=row_targets, weights=divided, inside=False)
    samples = Dividing(divisions=divisions, inputs=inputs, targets=targets, weights=False, linear=False)
    return PackedTables(
        row_inputs=row_inputs,
        row_targets=row_targets,
        linear=rows.modules({place: values[0] for place, values in linear.items()}),
        inputs=inputs,
        targets=targets,
        attention=samples.modules({place: values[0] for place, values in attention.items()}),
        prefix=_prefix(entry, where),
    )


def _on_one_grid(
    points: Mapping[_Place, Points], has_decoder: bool, like: Collection[_Place] = ()
) -> tuple[IntArray, IntArray, IntArray, dict[_Place, IntArray]]:
    """Sizes, inputs and targets of all tables, and their values there: int64 `[sizes, inputs, targets]` each.

    The union of their axes leaves their interpolation unchanged. Tables that are only in `like` are 0.
    """
    axes = {place: axes_of(place[0], has_decoder) for place in points}
    sizes, inputs, targets = (
        increasing([x[axes[place].index(d)] for place, table in points.items() if d in axes[place] for x in table])
        for d in range(3)
    )
    whole = sizes, inputs, targets if len(targets) else np.zeros(1, np.int64)
    values = {place: np.zeros(tuple(map(len, whole)), np.int64) for place in (*points, *like)}
    for place, table in points.items():
        sampled = _resample(table, tuple(whole[d] for d in axes[place]), unit_of(place[1]))
        values[place][:] = np.expand_dims(sampled, tuple(d for d in range(3) if d not in axes[place]))
    return *whole, values


def _prefix(entry: PackedEntry, where: str) -> IntArray | None:
    """The costs that attending to a prefix adds to each of `PREFIX_QUANTITIES`."""
    prefixes = {
        PARTS[quantity][part]: table.prefix
        for quantity in PARTS
        for part, table in getattr(entry, quantity).items()
        if table.prefix is not None
    }
    if not prefixes:
        return None
    if prefixes.keys() != {("encoder", quantity) for quantity in PREFIX_QUANTITIES}:
        raise CostModelError(f"{where}: expected a prefix under packed times and memory of encoder alone, under each")
    return np.array(
        [[round(x * unit_of(q) * PREFIX_UNIT) for x in prefixes["encoder", q]] for q in PREFIX_QUANTITIES], np.int64
    )


def _resample(points: Points, axes: tuple[IntArray, ...], scale: int) -> IntArray:
    """The table's values at every point of `axes`, in integers of 1/scale; `ABSENT` where it cannot tell.

    `axes` hold the table's own grid and more. Along each dimension in turn a new grid point takes the weighted mean of
    the two around it (of multilinear interpolation nothing else is left there), or `ABSENT` with either of them.
    """
    measured = [increasing([point[d] for point in points]) for d in range(len(axes))]
    dense = np.full([len(axis) for axis in measured], np.nan)
    for point, value in points.items():
        dense[tuple(int(np.searchsorted(axis, x)) for axis, x in zip(measured, point, strict=True))] = value
    for d, (axis, targets) in enumerate(zip(measured, axes, strict=True)):
        dense = np.moveaxis(_along_first(np.moveaxis(dense, d, 0), axis, targets), 0, d)
    scaled = np.where(np.isnan(dense), ABSENT, np.rint(dense * scale))
    return np.asarray(scaled, np.int64)


def _along_first(dense: npt.NDArray[np.float64], axis: IntArray, targets: IntArray) -> npt.NDArray[np.float64]:
    clamped = np.maximum(targets, axis[0])
    low = np.minimum(np.searchsorted(axis, clamped, side="right") - 1, len(axis) - 1)
    high = np.minimum(low + 1, len(axis) - 1)
    part = (clamped - axis[low]) / np.maximum(axis[high] - axis[low], 1)
    part = part.reshape((-1,) + (1,) * (dense.ndim - 1))
    mixed = np.where(part == 0, dense[low], (1 - part) * dense[low] + part * dense[high])
    mixed[targets > axis[-1]] = np.nan
    return np.asarray(mixed, np.float64)
