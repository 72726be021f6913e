"""Costs of a model that is divided at named places: segments instead of layers (`dynapipe-cost-model/1`, generic kind).

    segment 0 │ segment 1 │ segment 2          each with its own tables of time and memory over (size, length)
           "h.1"       "h.2"

Segments differ from one another, while a planner's tables are of layers that are alike. So planning takes each stage
for one layer that costs what the heaviest stage does at every shape: predicted times and memory are upper bounds, and
close ones once `planning.segments` has made the stages alike.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec

from megatron_dynapipe.cost.file import TableCostModel
from megatron_dynapipe.cost.format import FORMAT, CostEntry, CostFile, Link, Table, key_of
from megatron_dynapipe.errors import ConfigError, CostModelError
from megatron_dynapipe.units import BYTES_PER_MB, Recompute

_NonNegative = Annotated[float, msgspec.Meta(ge=0)]
_STATE_BYTES = 16
"""Of a parameter: itself, its gradient and Adam's two moments, 4 bytes each."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one segment costs, with tables keyed "<length>" of rows `[micro-batch size, value]`.

    Attributes:
        name: of the cut before it; "" for the first segment.
        parameters: their number.
        time_ms: tables "forward" and "backward".
        stored_activation_mb: kept from a forward's end to its backward's.
        peak_activation_mb: high-water mark of both passes.
        boundary_mb: of what crosses to the next segment; zeros after the last.
    """

    name: str
    parameters: Annotated[int, msgspec.Meta(ge=0)]
    time_ms: dict[Literal["forward", "backward"], Table]
    stored_activation_mb: Table
    peak_activation_mb: Table
    boundary_mb: Table

    @property
    def state_mb(self) -> float:
        """Parameters, gradients and optimizer state in fp32."""
        return self.parameters * _STATE_BYTES / BYTES_PER_MB

    def total_ms(self) -> float:
        """Forward and backward, summed over the shapes that were measured."""
        return sum(value for table in self.time_ms.values() for rows in table.values() for _, value in rows)

    def largest_mb(self) -> float:
        """Peak memory of the largest shape that was measured."""
        return max((value for rows in self.peak_activation_mb.values() for _, value in rows), default=0.0)


class SegmentCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A cost model file of the generic kind."""

    format: str = FORMAT
    kind: Literal["segments"]
    name: str
    source: str
    device: str
    units: dict[str, str]
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1)]
    links: dict[str, Link] = {}

    def __post_init__(self) -> None:
        shapes = {_shapes(table) for each in self.segments for table in _tables(each)}
        if len(shapes) != 1 or not next(iter(shapes)):
            raise CostModelError(
                f"expected all tables of cost model {self.name} to hold the same shapes, got "
                f"{len(shapes)} different sets"
            )

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the cuts between the segments."""
        return tuple(each.name for each in self.segments[1:])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            CostModelError: it is missing, or not of this kind; the message names the field that is wrong.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CostModelError(
                f"cannot read the cost model {path}: {error.strerror}", hint="modules.profile_module makes one"
            ) from error
        return cls.decode(data, origin=str(path))

    @classmethod
    def decode(cls, data: bytes, *, origin: str = "cost model") -> Self:
        """Read the bytes of a file; raises as `load`."""
        try:
            costs = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, CostModelError) as error:
            raise CostModelError(f"{origin} is not a cost model of segments: {error}") from error
        if costs.format != FORMAT:
            raise CostModelError(f"{origin}: expected format {FORMAT!r}, got {costs.format!r}")
        return costs

    def save(self, path: Path) -> None:
        """Write a file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def parameters_of(self, stage_of: Sequence[int]) -> list[int]:
        """Parameters of every stage.

        Args:
            stage_of: the stage of each segment.
        """
        self._check(stage_of)
        totals = [0] * (max(stage_of) + 1)
        for segment, stage in zip(self.segments, stage_of, strict=True):
            totals[stage] += segment.parameters
        return totals

    def state_bytes(self, stage_of: Sequence[int]) -> list[int]:
        """Parameters, gradients and optimizer state of every stage in fp32."""
        return [count * _STATE_BYTES for count in self.parameters_of(stage_of)]

    def bytes_per_position(self, stage_of: Sequence[int]) -> int:
        """The most that crosses a boundary between stages, per padded position."""
        crossing = [
            value * BYTES_PER_MB / (size * int(length))
            for segment, stage, following in zip(self.segments, stage_of, [*stage_of[1:], stage_of[-1]], strict=True)
            if stage != following
            for length, rows in segment.boundary_mb.items()
            for size, value in rows
        ]
        return max(1, round(max(crossing, default=1.0)))

    def heaviest_stage(self, stage_of: Sequence[int]) -> TableCostModel:
        """A cost model whose one layer costs, at every shape, what the heaviest stage does.

        Args:
            stage_of: the stage of each segment.
        """
        self._check(stage_of)
        entry = CostEntry(
            tp=1,
            recompute=Recompute.NONE,
            model_state_mb={"embedding": 0.0, "encoder": max(self.parameters_of(stage_of)) * 2 / BYTES_PER_MB},
            time_ms={
                "encoder.forward": self._heaviest(stage_of, lambda each: each.time_ms["forward"]),
                "encoder.backward": self._heaviest(stage_of, lambda each: each.time_ms["backward"]),
                "postprocess.forward": self._nothing(),
                "postprocess.backward": self._nothing(),
            },
            stored_activation_mb={"encoder": self._heaviest(stage_of, lambda each: each.stored_activation_mb)},
            peak_activation_mb={"encoder": self._peaks(stage_of)},
        )
        file = CostFile(
            name=self.name,
            source=self.source,
            device=self.device,
            units=self.units,
            model={},
            keys={key_of(1, Recompute.NONE): entry},
            links=self.links,
            peak_covers_backward=True,
        )
        identity = msgspec.json.encode([self, list(stage_of)])
        return TableCostModel(file, digest=hashlib.blake2b(identity, digest_size=16).hexdigest())

    def _heaviest(self, stage_of: Sequence[int], table_of: Callable[[Segment], Table]) -> Table:
        """The largest over stages of a quantity summed over each one's segments."""
        table: Table = {}
        for length, rows in self._nothing().items():
            for row, (size, _) in enumerate(rows):
                sums = [0.0] * (max(stage_of) + 1)
                for segment, stage in zip(self.segments, stage_of, strict=True):
                    sums[stage] += dict(table_of(segment)[length])[size]
                table.setdefault(length, []).insert(row, (size, max(sums)))
        return table

    def _peaks(self, stage_of: Sequence[int]) -> Table:
        """A stage's peak: what its segments keep, and the most that one of them needs beyond that."""
        above: dict[str, list[tuple[int, float]]] = {}
        stored = self._heaviest(stage_of, lambda each: each.stored_activation_mb)
        for length, rows in stored.items():
            for size, kept in rows:
                beyond = [
                    dict(each.peak_activation_mb[length])[size] - dict(each.stored_activation_mb[length])[size]
                    for each in self.segments
                ]
                above.setdefault(length, []).append((size, kept + max(0.0, *beyond)))
        return above

    def _nothing(self) -> Table:
        return {length: [(size, 0.0) for size, _ in rows] for length, rows in self.segments[0].boundary_mb.items()}

    def _check(self, stage_of: Sequence[int]) -> None:
        if len(stage_of) != len(self.segments):
            raise ConfigError(
                f"expected the stages of {len(self.segments)} segments, got those of {len(stage_of)}",
                hint="use costs that were profiled with the same split points",
            )


def _tables(segment: Segment) -> list[Table]:
    quantities = (segment.stored_activation_mb, segment.peak_activation_mb, segment.boundary_mb)
    return [*segment.time_ms.values(), *quantities]


def _shapes(table: Table) -> frozenset[tuple[str, int]]:
    return frozenset((length, size) for length, rows in table.items() for size, _ in rows)
