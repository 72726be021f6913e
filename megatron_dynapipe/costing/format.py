"""The cost model file (`dynapipe-cost-model/1`) as values: read strictly, written exactly.

Times are in ms, memory in MB (1e6 bytes), tables keyed "<length>" or "<input length>,<target length>" with rows
`[micro-batch size, value]`. What a model answers is in the tables of its keys, a point that is absent is infeasible.
A file that was fitted also keeps the measurements that it was fitted to, under `measured`, and where they came from,
under `provenance`; the published files have neither.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megatron_dynapipe.core.costs import LARGEST_COST, LAYER_KINDS, Division, LayerKind, Quantity
from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, ModelFamily, Recompute
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.division import shares_by_flops
from megatron_dynapipe.costing.document import FORMAT, MOST, Size, Table
from megatron_dynapipe.costing.modules import Part
from megatron_dynapipe.costing.shape import Experts
from megatron_dynapipe.files import read_unpacked

PROCESSOR_SHARE, REPEATS_SPREAD = "processor_share", "repeats_spread"
"""Names under which a file's provenance says how quiet the machine was."""
QUIET_SHARE, QUIET_SPREAD = 0.7, 0.25
"""A machine is busy where passes have less of a processor, or half of their repeats lie further apart."""
PACKED_FORMAT = "dynapipe-cost-model/2"
"""The format of files with costs of packed rows; without them a file is of the first format."""

Points = dict[tuple[int, ...], float]
"""{(size, *lengths): value}."""

_NonNegative = Annotated[float, msgspec.Meta(ge=0, le=MOST)]

_WHOLE: tuple[Part, ...] = (*LAYER_KINDS, "postprocess")
_STORED: tuple[Part, ...] = (*_WHOLE, "encoder_output")
_WAYS = {"forward": Quantity.FORWARD, "backward": Quantity.BACKWARD}
PARTS: Mapping[str, Mapping[str, tuple[Part, Quantity]]] = {
    "time_ms": {f"{part}.{way}": (part, quantity) for part in _WHOLE for way, quantity in _WAYS.items()},
    "stored_activation_mb": {part: (part, Quantity.STORED) for part in _STORED},
    "peak_activation_mb": {part: (part, Quantity.PEAK) for part in _WHOLE},
}
"""The tables of a key, by quantity and part, and what each says of its part. The memory of `postprocess`, of both
quantities, and `encoder_output` may be left out: the published files say nothing of them, and they count as 0."""


class Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one layer, by part."""

    time_ms: dict[str, Table]
    stored_activation_mb: dict[str, Table]
    peak_activation_mb: dict[str, Table]


class PackedPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Costs of one part in packed rows: `linear` at the row's positions, and `attention` of each sample at its own.

    Keys are positions: inputs for the encoder and decoder-only models, "<inputs>,<targets>" for the decoder, those it
    reads for postprocess and the encoder's output, which have no attention. `prefix` is what a piece of n positions
    after m earlier ones costs more: once, times m, and times m · n (`costing.pieces`).
    """

    linear: dict[str, _NonNegative]
    attention: dict[str, _NonNegative] = {}
    prefix: tuple[_NonNegative, _NonNegative, _NonNegative] | None = None


class PackedEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Costs of one layer in packed rows, by part; the same parts as the padded tables, and how they are divided."""

    time_ms: dict[str, PackedPart]
    stored_activation_mb: dict[str, PackedPart]
    peak_activation_mb: dict[str, PackedPart]
    division: dict[LayerKind, Division] = {}


class CostEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One (tensor parallelism, recompute) combination.

    `model_state_mb` counts 2 bytes a parameter: of word embeddings, a layer of each kind, and all experts of a layer
    that has them. Of models where only some have, these are layers of the kind "expert". If ranks share the experts,
    `expert_parallel` says how many ranks. `measured` holds the points that the tables were
    fitted to, `packed` the costs of packed rows where those were measured (format 2), `division` how layers' costs are
    divided where that was. `trained_state_mb` counts the adapters of a layer of each kind, in a model that trains them
    alone.
    """

    tp: Size
    recompute: Recompute
    model_state_mb: dict[Literal["embedding", "encoder", "decoder", "expert", "experts"], _NonNegative]
    time_ms: dict[str, Table]
    stored_activation_mb: dict[str, Table]
    peak_activation_mb: dict[str, Table]
    trained_state_mb: dict[LayerKind, _NonNegative] = {}
    expert_parallel: Size = 1
    measured: Tables | None = None
    packed: PackedEntry | None = None
    division: dict[LayerKind, Division] = {}

    @property
    def evidence(self) -> "CostEntry | Tables":
        """The measurements, where they are kept apart from the tables, else the tables."""
        return self.measured or self

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers."""
        return tuple(kind for kind in LAYER_KINDS if kind in self.model_state_mb)

    @property
    def family(self) -> ModelFamily:
        """Whether there are decoder layers."""
        return ModelFamily.T5 if "decoder" in self.model_state_mb else ModelFamily.GPT


class CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A cost model file.

    With `peak_covers_backward` the peaks are the high-water marks of forward and backward together; without it, as in
    the published files, of the forward alone.
    """

    format: str = FORMAT
    name: str
    source: str
    device: str
    units: dict[str, str]
    model: dict[str, msgspec.Raw]
    keys: Annotated[dict[str, CostEntry], msgspec.Meta(min_length=1)]
    provenance: dict[str, str | int | float | bool] = {}
    links: dict[str, Link] = {}
    peak_covers_backward: bool = False

    @property
    def family(self) -> ModelFamily:
        """The kind of model that all keys describe."""
        return next(iter(self.keys.values())).family

    @property
    def key_value_channels(self) -> int:
        """Channels of a position's keys in one layer of the model that was measured; 0 where the file does not say."""
        heads, groups = self._number("heads"), self._number("query_groups")
        return (groups or heads) * self._number("kv_channels")

    @property
    def hidden_size(self) -> int | None:
        """Hidden size of the model that was measured; None where the file does not say."""
        return self._number("hidden") or None

    @property
    def exchange_bytes(self) -> int:
        """Bytes of a position's states on their way to its experts; 0 where the model has none."""
        if "experts" not in self.model:
            return 0
        element = 4 if self.provenance.get("dtype") == "float32" else 2
        return msgspec.json.decode(self.model["experts"], type=Experts).per_token * self._number("hidden") * element

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that the layers were measured with; None where all weights were trained."""
        if "adapters" not in self.model:
            return None
        try:
            return msgspec.json.decode(self.model["adapters"], type=Adapters)
        except msgspec.DecodeError as error:
            raise CostModelError(f"{self.name}: expected adapters under model.adapters: {error}") from error

    def shares_by_flops(self, recompute: Recompute) -> Mapping[LayerKind, Division]:
        """How layers' costs are divided where that was not measured; empty where the file does not say its widths."""
        hidden, ffn = self._number("hidden"), self._number("ffn")
        channels = self._number("heads") * self._number("kv_channels")
        return shares_by_flops(hidden, channels, ffn, recompute) if hidden and ffn and channels else {}

    def _number(self, name: str) -> int:
        """One of the model's; 0 where the file does not say."""
        try:
            return msgspec.json.decode(self.model.get(name, b"0"), type=int)
        except msgspec.DecodeError as error:
            raise CostModelError(f"{self.name}: expected a whole number under model.{name}: {error}") from error


def key_of(tensor_parallel: int, recompute: Recompute) -> str:
    """The name of a combination's entry."""
    return f"tp{tensor_parallel}_{recompute}"


def read_file(path: Path) -> tuple[CostFile, bytes]:
    """A cost model file (`.gz`: compressed), and its bytes, unpacked; raises `CostModelError`."""
    try:
        data = read_unpacked(path)
    except OSError as error:
        raise CostModelError(
            f"cannot read the cost model {path}: {error.strerror}", hint="`megatron-dynapipe profile` makes one"
        ) from error
    return decode_file(data, origin=str(path)), data


def decode_file(data: bytes, *, origin: str) -> CostFile:
    """Read the bytes of a cost model file.

    Raises:
        CostModelError: they are not one; the message names `origin` and the field that is wrong.
    """
    # A pickle, by its first byte from protocol 2 on; older ones end with a full stop, as no JSON does.
    if data.startswith(b"\x80") or (data[:1] in (b"(", b"c", b"]", b"}") and data.endswith(b".")):
        raise CostModelError(
            f"{origin} is a pickle, the published form of cost models, which runs code when it is loaded",
            hint=f"cost models are JSON here ({FORMAT}): make one with `megatron-dynapipe profile`",
        )
    try:
        file = msgspec.json.decode(data, type=CostFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CostModelError(f"{origin} is not a cost model file: {error}") from error
    if file.format not in (FORMAT, PACKED_FORMAT):
        raise CostModelError(f"{origin}: expected format {FORMAT!r} or {PACKED_FORMAT!r}, got {file.format!r}")
    if file.format == FORMAT and any(entry.packed is not None for entry in file.keys.values()):
        raise CostModelError(f"{origin}: costs of packed rows need format {PACKED_FORMAT!r}, got {file.format!r}")
    for key, entry in file.keys.items():
        if key != (expected := key_of(entry.tp, entry.recompute)):
            raise CostModelError(f"{origin}: key {key!r} holds the tables of {expected!r}")
        for division in (entry.division, {} if entry.packed is None else entry.packed.division):
            if division and (missing := set(entry.kinds) - division.keys()):
                raise CostModelError(f"{origin}, {key}: division lacks {sorted(missing)}")
    if len({entry.kinds for entry in file.keys.values()}) != 1:
        raise CostModelError(f"{origin}: only some of its keys have decoder layers, or layers with experts")
    return file


def encode_file(file: CostFile) -> bytes:
    """The bytes of a cost model file, one table to a line, so that two files can be compared by eye."""
    data = msgspec.json.encode(file)
    return data.replace(b"]],", b"]],\n").replace(b'"keys":', b'\n"keys":') + b"\n"


def read_points(entry: CostEntry | Tables, kinds: Collection[LayerKind], where: str) -> dict[tuple[str, str], Points]:
    """Every table of a key: {(quantity, part): points}; where a shape was measured twice, the last one counts.

    Raises:
        CostModelError: a part is missing or unknown, or a table is empty or holds what cannot be a shape or a cost.
    """
    points = {}
    absent = _absent_parts(entry, kinds)
    for quantity, parts in PARTS.items():
        tables: dict[str, Table] = getattr(entry, quantity)
        expected = sorted(parts.keys() - absent)
        if sorted(tables) != expected:
            raise CostModelError(f"{where}: expected {quantity} of {expected}, got {sorted(tables)}")
        for part in expected:
            lengths = 2 if part.startswith("decoder") else 1
            points[quantity, part] = _read_table(tables[part], lengths, f"{where}, {quantity}.{part}")
    return points


def _absent_parts(entry: CostEntry | Tables, kinds: Collection[LayerKind]) -> set[str]:
    """Parts that a model with these kinds of layers does not have, and those that this entry may leave out and does."""
    others = {"decoder", "expert"} - set(kinds)
    absent = {part for rows in PARTS.values() for part in rows if part.split(".")[0] in others}
    if "decoder" in others:
        absent.add("encoder_output")
    if "postprocess" not in entry.stored_activation_mb.keys() | entry.peak_activation_mb.keys():
        absent.add("postprocess")
    if "encoder_output" not in entry.stored_activation_mb:
        absent.add("encoder_output")
    return absent


def read_packed(
    entry: PackedEntry, parts: Collection[tuple[str, str]], where: str
) -> dict[tuple[str, str], tuple[Points, Points]]:
    """Every packed part of a key: {(quantity, part): (linear, attention)}, as points of size 1.

    Args:
        entry: the packed tables.
        parts: (quantity, part) of the padded tables; the packed ones must be of the same.
        where: for messages.

    Raises:
        CostModelError: a part is missing or unknown, or a key or a value cannot be.
    """
    points = {}
    for quantity in PARTS:
        tables: dict[str, PackedPart] = getattr(entry, quantity)
        expected = sorted(part for other, part in parts if other == quantity)
        if sorted(tables) != expected:
            raise CostModelError(f"{where}: expected packed {quantity} of {expected}, got {sorted(tables)}")
        for part, table in tables.items():
            lengths = 2 if part.startswith("decoder") else 1
            name = f"{where}, packed {quantity}.{part}"
            linear, attention = (
                {key: [(1, value)] for key, value in values.items()} for values in (table.linear, table.attention)
            )
            points[quantity, part] = (
                _read_table(linear, lengths, f"{name}.linear"),
                _read_table(attention, lengths, f"{name}.attention") if attention else {},
            )
    return points


def axes_of(part: Part, has_decoder: bool) -> tuple[int, ...]:
    """The axes of a part's costs, by their place among sizes, inputs and targets."""
    if part == "decoder":
        return 0, 1, 2
    return (0, 2) if has_decoder and part == "postprocess" else (0, 1)


def unit_of(quantity: Quantity) -> int:
    """Integers of a grid in the file's unit: ns in a ms, bytes in a MB."""
    return NS_PER_MS if quantity in (Quantity.FORWARD, Quantity.BACKWARD) else BYTES_PER_MB


def to_table(points: Points) -> Table:
    """The table of some points, in the order of their lengths and sizes."""
    table: Table = {}
    for (size, *lengths), value in sorted(points.items(), key=lambda point: (point[0][1:], point[0][0])):
        table.setdefault(",".join(map(str, lengths)), []).append((size, value))
    return table


def _read_table(table: Table, lengths: int, where: str) -> Points:
    points: Points = {}
    for key, rows in table.items():
        try:
            point = tuple(int(part) for part in key.split(","))
        except ValueError:
            point = ()
        if len(point) != lengths or not 1 <= min(point) <= max(point) <= MOST:
            raise CostModelError(f"{where}: expected keys of {lengths} positive length(s), got {key[:40]!r}")
        for size, value in rows:
            if not (math.isfinite(value) and 0 <= value * NS_PER_MS <= LARGEST_COST):
                raise CostModelError(
                    f"{where}: expected a cost of 0 or more at length {key}, size {size}, got {value}",
                    hint="profile again; a cost cannot be negative, infinite or not a number",
                )
            points[(size, *point)] = value
    if not points:
        raise CostModelError(f"{where}: the table is empty")
    return points


def noise(file: CostFile) -> str | None:
    """How busy the machine was with other work while a file was measured; None where it was quiet, or is not known."""
    share, spread = (file.provenance.get(name) for name in (PROCESSOR_SHARE, REPEATS_SPREAD))
    if isinstance(share, float) and share < QUIET_SHARE:
        return f"its passes had a processor for {share:.0%} of the time"
    if isinstance(spread, float) and spread > QUIET_SPREAD:
        return f"repeats of a pass are {spread:.0%} apart"
    return None
