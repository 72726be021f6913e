"""Costs of a model that is divided at named places: segments instead of layers (`dynapipe-cost-model/1`, generic kind),
and the division of segments into stages.

    segment 0 │ segment 1 │ segment 2          each with its own tables of time and memory over (size, length)
           "h.1"       "h.2"

Planning takes each virtual stage for one module of a kind of its own, which costs what its segments do together:

    segments  0   1   2   3   4        forward, backward, stored   sums over the stage's segments
    stages    └─ 0 ─┘ └ 1 ┘  2         peak                        the largest, over them, of what those before it
                                                                   stored and its own peak
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.choosing.evenest import evenest
from megatron_dynapipe.core.costs import ABSENT, HEAD, CostTables, IntArray, Kind, ModelState, Quantity, increasing
from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.core.model import Model
from megatron_dynapipe.core.network import Link, Network
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, ModelFamily, Recompute
from megatron_dynapipe.costing.document import FORMAT, Table, is_cost_file
from megatron_dynapipe.outputs import write_file

_NonNegative = Annotated[float, msgspec.Meta(ge=0)]
_STATE_BYTES = 16
"""Bytes of a trained parameter: itself, its gradient and Adam's two moments, 4 bytes each."""


class Segment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The costs of one segment, with tables keyed "<length>" of rows `[micro-batch size, value]`.

    Attributes:
        name: the name of the cut before it; "" for the first segment.
        parameters: the number of those that are trained.
        frozen_mb: the other parameters', which have neither gradients nor optimizer state.
        time_ms: tables "forward" and "backward".
        stored_activation_mb: kept from a forward's end to its backward's.
        peak_activation_mb: high-water mark of both passes.
        boundary_mb: what crosses to the next segment; zeros after the last.
    """

    name: str
    parameters: Annotated[int, msgspec.Meta(ge=0)]
    frozen_mb: _NonNegative = 0.0
    time_ms: dict[Literal["forward", "backward"], Table]
    stored_activation_mb: Table
    peak_activation_mb: Table
    boundary_mb: Table

    @property
    def state_mb(self) -> float:
        """Weights, gradients and optimizer state, what is trained of them in fp32."""
        return self.parameters * _STATE_BYTES / BYTES_PER_MB + self.frozen_mb

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
        shapes = {_shapes(table) for segment in self.segments for table in _tables(segment)}
        if len(shapes) != 1 or not next(iter(shapes)):
            raise CostModelError(
                f"expected all tables of cost model {self.name} to hold the same shapes, got "
                f"{len(shapes)} different sets"
            )

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the cuts between the segments."""
        return tuple(segment.name for segment in self.segments[1:])

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
        """Write a file; raises ConfigError as `outputs.write_file`."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n", is_ours=is_cost_file)

    def state_bytes(self, stage_of: Sequence[int]) -> list[int]:
        """Weights, gradients and optimizer state of every stage.

        Args:
            stage_of: the stage of each segment.
        """
        self._check(stage_of)
        totals = [0] * (max(stage_of) + 1)
        for segment, stage in zip(self.segments, stage_of, strict=True):
            totals[stage] += round(segment.state_mb * BYTES_PER_MB)
        return totals

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

    def of_stages(self, stage_of: Sequence[int]) -> "StageCostModel":
        """These costs as planning asks for them, each virtual stage being one module.

        Args:
            stage_of: the virtual stage of each segment.
        """
        self._check(stage_of)
        return StageCostModel(self, stage_of)

    def _check(self, stage_of: Sequence[int]) -> None:
        if len(stage_of) != len(self.segments):
            raise ConfigError(
                f"expected the stages of {len(self.segments)} segments, got the stages of {len(stage_of)}",
                hint="use costs that were profiled with the same split points",
            )


class StageCostModel:
    """A `CostModel` whose modules are the virtual stages of a divided model: no two of them need cost the same.

    Args:
        costs: the segments' costs.
        stage_of: the virtual stage of each.
    """

    family = ModelFamily.GPT
    hidden_size = None

    def __init__(self, costs: SegmentCosts, stage_of: Sequence[int]) -> None:
        self.name: str = costs.name
        self.links: Mapping[str, Link] = costs.links
        self.digest = hashlib.blake2b(msgspec.json.encode([costs, list(stage_of)]), digest_size=16).hexdigest()
        self._tables = _tables_of_stages(costs, stage_of)

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        """The costs of the stages; raises CostModelError for tensor-parallel ranks and for recomputation."""
        if (tensor_parallel, recompute) != (1, Recompute.NONE):
            raise CostModelError(
                f"cost model {self.name} has no table for tensor parallelism {tensor_parallel} with recompute "
                f"{recompute}: segments are measured whole and without recomputation"
            )
        return self._tables


def stage_kinds(stages: int) -> tuple[Kind, ...]:
    """Kinds of the modules that virtual stages are taken for."""
    return tuple(f"stage {stage}" for stage in range(stages))


def segment_settings(
    costs: SegmentCosts,
    stage_of: Sequence[int],
    *,
    stages: int,
    replicas: int,
    memory_limit_bytes: int,
    network: Network | None = None,
    schedule: ScheduleSettings | None = None,
) -> PlannerSettings:
    """Settings of a planner that takes every virtual stage for one module, as `costs.of_stages` does.

    Args:
        costs: the segments' costs.
        stage_of: the virtual stage of each segment.
        stages: ranks of a pipeline.
        replicas: the number of the pipeline's replicas.
        memory_limit_bytes: memory of one device.
        network: links between devices; by default those that the costs were measured with.
        schedule: how passes are ordered.
    """
    virtual = stage_of[-1] + 1
    state = costs.state_bytes(stage_of)
    return PlannerSettings(
        model=Model(encoder=stage_kinds(virtual), modules_per_layer=1),
        hidden_size=costs.bytes_per_position(stage_of),
        element_bytes=1,
        data_parallel=replicas,
        pipeline_parallel=stages,
        chunks=virtual // stages,
        memory_limit_bytes=memory_limit_bytes,
        recompute=(Recompute.NONE,),
        network=network or Network.over(costs.links, devices_per_node=8),
        model_state_bytes=tuple(sum(state[rank::stages]) for rank in range(stages)),
        schedule=schedule or ScheduleSettings(),
    )


def stage_of_each(counts: Sequence[int]) -> list[int]:
    """The stage of each segment, from the number of segments on each stage."""
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def divide_segments(
    costs: SegmentCosts, points: Sequence[str], stages: int, memory_limit_bytes: int | None = None
) -> list[int]:
    """Divide segments by their measured times, within memory.

    Args:
        costs: the costs of the segments between the points.
        points: names of the cuts, in order.
        stages: how many.
        memory_limit_bytes: memory of one device; it has to hold a stage's parameters, gradients and optimizer state,
            and one micro-batch of the largest shape measured.

    Raises:
        ConfigError: the costs belong to other segments.
        InfeasibleError: no division fits the memory.
    """
    if tuple(points) != costs.points:
        raise ConfigError(
            f"expected costs of segments divided at {', '.join(points)}, got {', '.join(costs.points)}",
            hint="profile the model with the same split points",
        )
    weights = [round(segment.total_ms() * 1e6) for segment in costs.segments]
    fits = None
    if memory_limit_bytes is not None:
        needed = [segment.state_mb + segment.largest_mb() for segment in costs.segments]
        fits = [
            [sum(needed[first:end]) * BYTES_PER_MB <= memory_limit_bytes for end in range(len(needed) + 1)]
            for first in range(len(needed))
        ]
    return stage_of_each(evenest(weights, stages, fits=fits))


def _tables_of_stages(costs: SegmentCosts, stage_of: Sequence[int]) -> CostTables:
    """Every stage's costs on the grid that was measured; what was not measured of it is absent."""
    points = [(size, int(length)) for length, rows in costs.segments[0].boundary_mb.items() for size, _ in rows]
    sizes, lengths = (increasing(axis) for axis in zip(*points, strict=True))
    stages = max(stage_of) + 1
    none = np.zeros(1, np.int64)
    values = np.zeros((stages + 1, len(Quantity), len(sizes), len(lengths), 1), np.int64)  # the last is no head
    for stage in range(stages):
        segments = [segment for segment, of in zip(costs.segments, stage_of, strict=True) if of == stage]
        times = [
            [_on_grid(segment.time_ms[way], sizes, lengths) for segment in segments] for way in ("forward", "backward")
        ]
        stored = np.array([_on_grid(segment.stored_activation_mb, sizes, lengths) for segment in segments])
        peaks = np.array([_on_grid(segment.peak_activation_mb, sizes, lengths) for segment in segments])
        before = stored.cumsum(axis=0) - stored
        rows = {
            Quantity.FORWARD: np.sum(times[0], axis=0) * NS_PER_MS,
            Quantity.BACKWARD: np.sum(times[1], axis=0) * NS_PER_MS,
            Quantity.STORED: stored.sum(axis=0) * BYTES_PER_MB,
            Quantity.PEAK: (before + peaks).max(axis=0) * BYTES_PER_MB,
        }
        for quantity, costs_of_stage in rows.items():
            values[stage, quantity, :, :, 0] = np.rint(np.nan_to_num(costs_of_stage))
    measured = np.zeros((len(sizes), len(lengths), 1), bool)
    for size, length in points:
        measured[np.searchsorted(sizes, size), np.searchsorted(lengths, length)] = True
    values[:, :, ~measured] = ABSENT
    kinds = stage_kinds(stages)
    state = costs.state_bytes(stage_of)
    return CostTables(
        kinds=(*kinds, HEAD),
        sizes=sizes,
        inputs=lengths,
        targets=none,
        values=values,
        state=ModelState(embedding_bytes=0, modules={kind: of // 8 for kind, of in zip(kinds, state, strict=True)}),
        peak_covers_backward=True,
    )


def _on_grid(table: Table, sizes: IntArray, lengths: IntArray) -> npt.NDArray[np.float64]:
    """A table's values, `[sizes, lengths]`, NaN where there is none."""
    values = np.full((len(sizes), len(lengths)), np.nan)
    for length, rows in table.items():
        for size, value in rows:
            values[np.searchsorted(sizes, size), np.searchsorted(lengths, int(length))] = value
    return values


def _tables(segment: Segment) -> list[Table]:
    quantities = (segment.stored_activation_mb, segment.peak_activation_mb, segment.boundary_mb)
    return [*segment.time_ms.values(), *quantities]


def _shapes(table: Table) -> frozenset[tuple[str, int]]:
    return frozenset((length, size) for length, rows in table.items() for size, _ in rows)
