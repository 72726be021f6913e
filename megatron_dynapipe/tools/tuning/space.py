"""The layouts that are considered: every division of the devices into data, tensor and pipeline parallelism, with
virtual stages and layer splits. What a layout cannot be built for is its error; nothing is left out silently."""

import enum
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from megatron_dynapipe.core.costs import ATTENTION
from megatron_dynapipe.core.errors import ConfigError, DynaPipeError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import CostModel, even_layer_split


class SplitMethod(enum.StrEnum):
    """How layers are split over stages."""

    EQUAL = "equal"
    """The same number on every stage; where that does not divide, the first stages have one more."""
    EVEN = "even"
    """The busiest stage has as little work as can be; the last one may have the head alone."""
    AUTO = "auto"
    """Training's own choice, by planning batches under many splits: slow."""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The layouts that are tried.

    Attributes:
        devices: the cluster's; every layout uses all of them.
        chunks: numbers of virtual stages per pipeline rank, on two or more stages.
        splits: layer splits; of several that put the same layers on every stage, the first counts.
        distributed_optimizer: whether optimizer state is sharded; None: wherever there are replicas, since that takes
            less memory and less time.
        tensor_sizes: the sizes of tensor parallelism that can be used; None: all.
        global_batch_size: samples of a global batch, which the replicas must divide; None where batches differ.
        expert_sizes: numbers of replicas that may share experts.
        halves: whether a stage may end in the middle of a layer.
    """

    devices: int
    chunks: tuple[int, ...] = (1,)
    splits: tuple[SplitMethod, ...] = (SplitMethod.EQUAL, SplitMethod.EVEN)
    distributed_optimizer: bool | None = None
    tensor_sizes: tuple[int, ...] | None = None
    global_batch_size: int | None = None
    expert_sizes: tuple[int, ...] = (1,)
    halves: bool = True

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"expected at least one device, got {self.devices}")
        if not self.chunks or min(self.chunks) < 1 or not self.splits:
            raise ConfigError(
                f"expected one or more numbers of chunks and layer splits, got {list(self.chunks)} and"
                f" {list(self.splits)}"
            )


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks share a model and its data; `chunks` are virtual stages per pipeline rank."""

    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    chunks: int = 1
    expert_parallel: int = 1

    @property
    def sizes(self) -> dict[str, Any]:
        """The size of every kind of parallelism, by name."""
        return {name: getattr(self, name) for name in Layout.__struct_fields__}


class Candidate(Layout, frozen=True, kw_only=True):
    """One layout of the space.

    Attributes:
        settings: the planner's; if they cannot be made, the model's on one device.
        split: how layers are split; `EVEN` and `AUTO` are chosen later.
        halves: whether that choice may divide a layer.
        error: why there is no such layout.
    """

    settings: PlannerSettings
    split: SplitMethod = SplitMethod.EQUAL
    halves: bool = True
    error: str | None = None


class Status(enum.StrEnum):
    """How far a layout was evaluated."""

    PLANNED = "planned"
    """Every batch was planned."""
    PARTIAL = "partial"
    """Some batches were planned before it was slower than the best, or the search was interrupted."""
    PRUNED = "pruned"
    """No batch was planned: it cannot be among the best, or the search was interrupted."""
    INFEASIBLE = "infeasible"


class TunedLayout(Layout, frozen=True, kw_only=True):
    """A parallel layout and its predictions, means over the batches that were planned.

    Attributes:
        layers_per_stage: layers of every virtual stage; None if they were not chosen.
        layout: auto, padded or packed: what plans may make of a micro-batch.
        distributed_optimizer: whether optimizer state is sharded.
        status: how far it was evaluated.
        batches: that were planned.
        predicted_ms: time of an iteration: forward, backward, transfers, reduction, optimizer; None without a plan.
        reduction_ms, optimizer_ms: parts of it: what passes do not hide of gradients' reduction and parameters'
            gathering, and the optimizer step.
        hidden_ms: what they hide of reduction and gathering.
        bound_ms: an iteration takes at least this.
        tokens_per_second: real tokens over predicted time.
        peak_memory_mb: peak memory of every pipeline rank.
        idle: share of the pipelines' time in which a stage runs no pass.
        micro_batches: the number on the replica that has most.
        recompute: modes of micro-batches, as `none+full`.
        mfu: model FLOPs utilization, of the device's peak; None where that is not known, and for experts.
        error: why it cannot be built, or a batch has no plan.
        measured_ms: time of an iteration, if it was trained.
        measurement_error: why it was trained without a measurement.
    """

    layers_per_stage: tuple[int | float, ...] | None = None
    layout: str
    distributed_optimizer: bool
    status: Status
    batches: int = 0
    predicted_ms: float | None = None
    reduction_ms: float | None = None
    hidden_ms: float | None = None
    optimizer_ms: float | None = None
    bound_ms: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: tuple[float, ...] = ()
    idle: float | None = None
    micro_batches: float | None = None
    recompute: str = ""
    mfu: float | None = None
    error: str | None = None
    measured_ms: float | None = None
    measurement_error: str | None = None


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """All layouts that were considered.

    Attributes:
        layouts: planned ones first, the fastest first; then partial and pruned ones, by their bounds; then infeasible
            ones.
        settings: the planner's settings of each.
        plans: that were made.
        seconds: that the search took.
        rivals: the best layout of each other way to make micro-batches that was asked for, by name; those without a
            plan are left out.
        rivals_with_stages: the same on the best layout with stages, where the best of all has none.
        interrupted: whether Ctrl-C ended it.
    """

    layouts: tuple[TunedLayout, ...]
    settings: tuple[PlannerSettings, ...]
    plans: int
    seconds: float
    rivals: Mapping[str, TunedLayout] = {}
    rivals_with_stages: Mapping[str, TunedLayout] = {}
    interrupted: bool = False

    @property
    def gain(self) -> float | None:
        """The time of the best rival on its own best layout over that of the best layout; None without either."""
        ours = self.layouts[0].predicted_ms
        fastest = fastest_of(self.rivals)
        return None if ours is None or fastest is None else (fastest[1].predicted_ms or math.nan) / ours


def fastest_of(rivals: Mapping[str, TunedLayout]) -> tuple[str, TunedLayout] | None:
    """The rival of least predicted time and its name; None where there is none."""
    return min(rivals.items(), key=lambda item: item[1].predicted_ms or math.inf, default=None)


def candidates(base: PlannerSettings, space: Space, cost_model: CostModel) -> list[Candidate]:
    """Every layout, in a fixed order."""
    names = Layout.__struct_fields__
    return [
        _candidate(base, space, cost_model, Layout(**dict(zip(names, (*sizes, chunks, experts), strict=True))), split)
        for sizes in divisions(space.devices)
        for chunks, split in _variants(base, space, pipeline=sizes[2])
        for experts in [size for size in space.expert_sizes if sizes[0] % size == 0] or space.expert_sizes[:1]
    ]


def divisions(devices: int) -> Iterator[tuple[int, int, int]]:
    """Data, tensor and pipeline parallelism whose product is `devices`."""
    for tensor in range(1, devices + 1):
        if devices % tensor == 0:
            rest = devices // tensor
            yield from ((rest // pipeline, tensor, pipeline) for pipeline in range(1, rest + 1) if rest % pipeline == 0)


def _variants(base: PlannerSettings, space: Space, pipeline: int) -> Iterator[tuple[int, SplitMethod]]:
    for chunks in space.chunks if pipeline > 1 else (1,):
        yield from ((chunks, split) for split in (space.splits if pipeline > 1 else [SplitMethod.EQUAL]))


def _candidate(
    base: PlannerSettings, space: Space, cost_model: CostModel, layout: Layout, split: SplitMethod
) -> Candidate:
    data = layout.data_parallel
    tensor = layout.tensor_parallel
    experts = layout.expert_parallel
    distributed = space.distributed_optimizer
    per_node = base.network.devices_per_node
    settings = base
    error = None
    try:
        if tensor > 1 and per_node % tensor:
            raise ConfigError(f"tensor parallelism of {tensor} does not divide a node's {per_node} devices")
        if space.tensor_sizes is not None and tensor not in space.tensor_sizes:
            raise ConfigError(f"checkpoints of the run cannot be loaded under tensor parallelism of {tensor}")
        if space.global_batch_size is not None and space.global_batch_size % data:
            raise ConfigError(f"{data} replicas do not divide global batches of {space.global_batch_size} samples")
        if data % experts:
            raise ConfigError(f"{data} replicas cannot share experts by {experts}")
        if ATTENTION not in cost_model.tables(tensor_parallel=tensor, recompute=base.recompute[0]).kinds:
            raise ConfigError(
                "costs of one division into stages do not tell the costs of another: give the costs of layers"
            )
        halves = split is SplitMethod.AUTO and space.halves and base.model.layers_divide
        even = even_layer_split(base.model.layers, layout.pipeline_parallel * layout.chunks, halves=halves)
        settings = msgspec.structs.replace(
            base,
            **layout.sizes,
            replicas_in_step=experts,
            modules_per_stage=base.model.modules_of(even),
            distributed_optimizer=data > 1 if distributed is None else distributed,
            sequence_parallel=base.sequence_parallel and tensor > 1,
        )
    except DynaPipeError as problem:
        error = problem.message
    return Candidate(settings=settings, split=split, halves=space.halves, error=error, **layout.sizes)
