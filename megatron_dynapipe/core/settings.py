"""The settings of plans: all that they depend on, other than the batch and the cost model."""

import math
from typing import Annotated, Literal, Self

import msgspec

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import LayerSplit, Model, ModuleSplit, PipelineLayout
from megatron_dynapipe.core.network import Network, ScatterGather, TransferRules
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import Partitioner
from megatron_dynapipe.core.problem import SplitBackward
from megatron_dynapipe.core.units import LENGTH_MULTIPLE, BatchLayout, Recompute

IMBALANCE = 1.25
"""Assumed between ranks that share experts and have several each: routers that are trained for balance keep
single experts within a factor of about two (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024)."""

_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Percent = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Precedent = tuple[_AtLeastOne, tuple[tuple[int, ...], ...]]
"""Of a plan: time over its batch's estimate, in millionths; rows as they enter: replica, positions, modes by stage."""


def check_fields(record: msgspec.Struct) -> None:
    """Run a record's constraints where it is made, as where it is decoded; raises ConfigError."""
    for field in msgspec.structs.fields(record):
        try:
            msgspec.convert(getattr(record, field.name), field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{type(record).__name__}.{field.name}: {error}") from None


class PlannerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, parallel layout, memory and choices of one run.

    Attributes:
        model: its stacks of modules.
        hidden_size: width of the states that cross stage boundaries.
        data_parallel, tensor_parallel, pipeline_parallel: the layout.
        chunks: virtual stages per pipeline rank.
        modules_per_stage: modules per virtual stage in model order, without the head; None puts as many layers on each.
        memory_limit_bytes: memory of one device that the plan may use, model state included.
        distributed_optimizer: whether optimizer state is sharded over the replicas.
        recompute: modes that a micro-batch may be given on a virtual stage.
        network: links between devices.
        scatter_gather: whether messages between stages are sharded over the tensor-parallel ranks.
        micro_batch_layouts: layouts that a micro-batch may be given.
        element_bytes: bytes of an element of the states that cross boundaries.
        sequence_parallel: whether those states are sharded over the tensor-parallel ranks.
        model_state_bytes: memory of every pipeline rank's parameters, gradients and optimizer states, where they were
            counted; None takes them from the cost model.
        partition: makes the micro-batches; None lets the planner search for them.
        schedule: how passes are ordered.
        transfers: when transfers are started, and what a start waits for.
        expert_parallel: replicas that share experts.
        expert_imbalance: tokens of the busiest of them over their mean: their experts' time and memory are taken so
            many times.
        label_experts: whether experts of the last layer run positions with labels alone, as other last MLPs do.
        replicas_in_step: neighbours that run in step, as many micro-batches on each, alike in time
            (`ways.in_step`); 1 for none.
        length_multiple: lengths of micro-batches are multiples of it, as its products want them.
        context_teams: the most neighbours that run samples together, each its share (`ways.teams`); 1 for none.
        slices: whether long samples are cut along their sequence: where that is faster, never, or always, with no piece
            of more positions than this (longer ones where there would be too many, `pieces.within_bound`).
        split_backward: whether backward passes are divided, so that weights' gradients fill a stage's waits: where that
            is faster, never, or all that can be.
        corrections: percent of what costs say that each virtual stage's forward passes take, and both halves of its
            backward ones; empty where costs stand as they are.
        precedents: plans of other batches; a search that comes as near to its estimate by following one ends early.
    """

    model: Model
    hidden_size: _AtLeastOne
    data_parallel: _AtLeastOne = 1
    tensor_parallel: _AtLeastOne = 1
    pipeline_parallel: _AtLeastOne = 1
    chunks: _AtLeastOne = 1
    modules_per_stage: ModuleSplit | None = None
    memory_limit_bytes: _AtLeastOne
    distributed_optimizer: bool = False
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    network: Network = Network()
    scatter_gather: ScatterGather = ScatterGather.OFF
    micro_batch_layouts: tuple[BatchLayout, ...] = (BatchLayout.PADDED,)
    element_bytes: _AtLeastOne = 2
    sequence_parallel: bool = False
    model_state_bytes: tuple[int, ...] | None = None
    partition: Partitioner | None = None
    schedule: ScheduleSettings = ScheduleSettings()
    transfers: TransferRules = TransferRules()
    expert_parallel: _AtLeastOne = 1
    expert_imbalance: Annotated[float, msgspec.Meta(ge=1)] = IMBALANCE
    label_experts: bool = False
    replicas_in_step: _AtLeastOne = 1
    length_multiple: Annotated[int, msgspec.Meta(ge=1, le=2**20, multiple_of=LENGTH_MULTIPLE)] = LENGTH_MULTIPLE
    context_teams: _AtLeastOne = 1
    slices: Annotated[int, msgspec.Meta(ge=LENGTH_MULTIPLE)] | Literal["auto", "off"] = "off"
    split_backward: SplitBackward = "off"
    corrections: tuple[tuple[Percent, Percent, Percent], ...] = ()
    precedents: tuple[Precedent, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.recompute or len(set(self.recompute)) != len(self.recompute):
            raise ConfigError(f"expected one or more different recompute modes, got {list(self.recompute)}")
        batch_layouts = self.micro_batch_layouts
        if not batch_layouts or len(set(batch_layouts)) != len(batch_layouts):
            raise ConfigError(f"expected one or two different layouts of micro-batches, got {list(batch_layouts)}")
        if self.partition is not None and self.partition.layout not in batch_layouts:
            raise ConfigError(
                f"expected settings that allow {self.partition.layout} micro-batches, which the partition makes,"
                f" got {', '.join(batch_layouts)}",
                hint=f"allow the layout {self.partition.layout}, or leave the partition out",
            )
        if isinstance(self.slices, int) and (reason := self._whole_samples_because) is not None:
            raise ConfigError(f"samples cannot be cut into pieces of {self.slices} positions: {reason}")
        if self.sequence_parallel and self.length_multiple % self.tensor_parallel:
            raise ConfigError(
                f"sequence parallelism needs a tensor-parallel size that divides {self.length_multiple}, "
                f"got {self.tensor_parallel}"
            )
        if self.scatter_gather is ScatterGather.ON and (self.tensor_parallel == 1 or self.sequence_parallel):
            raise ConfigError(
                "expected two or more tensor-parallel ranks that hold equal outputs to divide messages over, got "
                + ("parts of the sequence on each" if self.sequence_parallel else "one rank"),
                hint="leave scatter_gather at auto or off",
            )
        if not 1 <= self.expert_imbalance < math.inf:
            raise ConfigError(f"expected an imbalance of experts of at least 1, got {self.expert_imbalance}")
        if self.replicas_in_step < 1 or self.data_parallel % self.replicas_in_step:
            raise ConfigError(
                f"expected groups in step that divide {self.data_parallel} replicas, got {self.replicas_in_step}"
            )
        if self.context_teams > 1 and (reason := self._no_teams_because) is not None:
            raise ConfigError(f"replicas cannot run samples together in teams of {self.context_teams}: {reason}")
        if self.model_state_bytes is not None and len(self.model_state_bytes) != self.pipeline_parallel:
            raise ConfigError(
                f"expected the model state of {self.pipeline_parallel} pipeline ranks,"
                f" got {len(self.model_state_bytes)}"
            )
        if self.corrections and len(self.corrections) != self.pipeline_parallel * self.chunks:
            raise ConfigError(
                f"expected corrections of {self.pipeline_parallel * self.chunks} virtual stages,"
                f" got {len(self.corrections)}"
            )
        if self.layout.stages != self.pipeline_parallel:
            raise ConfigError(
                f"expected layers for {self.pipeline_parallel} × {self.chunks} virtual stages, got a layer split of "
                f"{self.layout.virtual_stages}"
            )

    @property
    def _whole_samples_because(self) -> str | None:
        """Why samples cannot be cut under these settings, or None."""
        if self.model.decoder:
            return "every position of a T5's encoder attends to all of them"
        if BatchLayout.PACKED not in self.micro_batch_layouts:
            return "pieces and shares run in packed rows, which the settings do not allow"
        if not self.searches:
            return "the adaptive schedule alone keeps the order of pieces, and makes teams"
        return None

    @property
    def _no_teams_because(self) -> str | None:
        """Why there can be no teams under these settings, or None."""
        most, node = self.context_teams, self.network.devices_per_node
        if self.model.layers_with_experts or self.replicas_in_step > 1:
            return "experts count the tokens of whole samples"
        if most & (most - 1) or most > self.data_parallel:
            return f"expected 2, 4, 8 … of {self.data_parallel} replicas"
        devices = most * self.tensor_parallel
        if node % devices and devices % node:
            return f"teams of {most} × {self.tensor_parallel} devices do not fill nodes of {node}"
        return self._whole_samples_because  # which keeps them from being shared, too

    @property
    def searches(self) -> bool:
        """Whether micro-batches and the order of passes are searched."""
        return self.partition is None and self.schedule.method == "adaptive"

    @property
    def may_cut(self) -> bool:
        """Whether samples may be cut along their sequence."""
        return self.slices != "off" and self._whole_samples_because is None

    @property
    def effective_split_backward(self) -> SplitBackward:
        """Whether the search may divide backward passes; a single stage waits for nobody."""
        alone = self.pipeline_parallel == 1 and self.split_backward == "auto"
        return self.split_backward if self.searches and not alone else "off"

    @property
    def divides_apart(self) -> bool:
        """Whether one replica may divide a backward pass that another runs whole."""
        return self.effective_split_backward != "off" and self.replicas_in_step < self.data_parallel

    @property
    def layout(self) -> PipelineLayout:
        """The model cut over the pipeline."""
        if self.modules_per_stage is None:
            return PipelineLayout.equal(self.model, self.pipeline_parallel * self.chunks, self.chunks)
        return PipelineLayout(model=self.model, modules_per_stage=self.modules_per_stage, chunks=self.chunks)

    def with_layers_per_stage(self, split: LayerSplit) -> Self:
        """The same run with its layers split so, over as many pipeline ranks."""
        chunks = len(split) // self.pipeline_parallel
        return msgspec.structs.replace(self, modules_per_stage=self.model.modules_of(split), chunks=chunks)

    @property
    def sent_per_position(self) -> int:
        """Bytes of a position's state, as stages send it."""
        return self.hidden_size * self.element_bytes

    @property
    def held_per_position(self) -> int:
        """Bytes of them that a rank holds."""
        return self.sent_per_position // (self.tensor_parallel if self.sequence_parallel else 1)
