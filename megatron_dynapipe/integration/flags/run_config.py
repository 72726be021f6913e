"""One run's configuration as one frozen value: what runs takes it or a part of it, and never Megatron's namespace."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_dynapipe.config import Cluster
from megatron_dynapipe.cost import PipelineLayout, ScatterGather, Split
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.integration.flags.batch_layout import Layouts, Slices
from megatron_dynapipe.integration.flags.resume_record import CheckpointConfig
from megatron_dynapipe.integration.models.config import ModelConfig, StateBytes
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.planning.problem import SplitBackward
from megatron_dynapipe.sampling import SamplerSettings, TruncationSide
from megatron_dynapipe.store import StoreAddress
from megatron_dynapipe.units import ModelFamily, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a run's ranks divide the work.

    Attributes:
        data, tensor, pipeline: sizes.
        chunks: virtual stages per pipeline rank.
        experts: ranks that share a layer's experts.
        in_step: neighbouring replicas that share experts, and so run in step; 1 for none.
        distributed_optimizer: whether optimizer states are sharded over replicas.
        layers_per_stage: of each virtual stage in model order; None splits layers equally.
    """

    data: int
    tensor: int
    pipeline: int
    chunks: int
    experts: int
    in_step: int
    distributed_optimizer: bool
    layers_per_stage: Split | None

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return self.pipeline * self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What is trained on and for how long.

    Attributes:
        seed: of the order of samples, and of dropouts.
        sampler: of training iterations.
        iterations: from the beginning; None where a stream of epochs has not been counted.
        evaluation: of the valid and test splits.
        evaluation_iterations: of one evaluation; 0 for none.
        most_samples: of an iteration of either.
    """

    seed: int
    sampler: SamplerSettings
    iterations: int
    evaluation: SamplerSettings
    evaluation_iterations: int
    most_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run, as it was asked for.

    Attributes:
        model: what is trained.
        parallel: over which ranks.
        training: on what, for how long.
        state: what a parameter's copies take.
        checkpoints: saved and loaded ones.
        in_checkout: whether a patched checkout's own script runs, and builds its own model.
        rank: of this process.
        device: of this rank.
        data: dataset folder.
        truncate: where truncated samples lose tokens.
        loss_on: which tokens of a decoder-only sample count; None as the dataset says.
        store: an existing plan store; None starts an embedded one.
        store_bind: address at which an embedded store listens.
        planners: planner processes of the job.
        ahead: iterations planned ahead of training.
        timeout_s: deadline of every wait: for a plan, for a peer, for the planner to start.
        cost_model: cost model file; None plans with the analytic model.
        calibrate_s: for how long layers are measured where there is no file; 0 does not measure.
        layer_costs: arguments that layers' costs depend on.
        cluster: what a cluster file says; None without one.
        memory_limit_bytes: memory of a device that plans may use; None takes the cluster's, else the device's, less a
            margin.
        reserves_all_memory: whether all that plans may use of a GPU is taken before the first iteration.
        scatter_gather: whether messages between stages are divided over tensor-parallel ranks.
        recompute: modes of recomputation that a micro-batch may be given.
        layouts: what micro-batches may be.
        slices: whether long samples are cut along their sequence.
        split_backward: whether backward passes are divided.
        undivided_because: why they are not, where the model's layers cannot.
        expert_imbalance: assumed between ranks that share experts.
        plans_layer_split: whether the layers per stage are yet to be planned.
        report_folder: where the run's records and pictures go.
        metrics_interval: iterations between two whose numbers are given to Megatron's writers.
        checks_losses: whether a loss that is not finite ends training.
    """

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    state: StateBytes
    checkpoints: CheckpointConfig
    in_checkout: bool
    rank: int
    device: torch.device
    data: Path
    truncate: TruncationSide
    loss_on: LossOn | None
    store: StoreAddress | None
    store_bind: str
    planners: int
    ahead: int
    timeout_s: float
    cost_model: Path | None
    calibrate_s: float
    layer_costs: Mapping[str, str]
    cluster: Cluster | None
    memory_limit_bytes: int | None
    reserves_all_memory: bool
    scatter_gather: ScatterGather
    recompute: tuple[Recompute, ...]
    layouts: Layouts
    slices: Slices
    split_backward: SplitBackward
    undivided_because: str
    expert_imbalance: float
    plans_layer_split: bool
    report_folder: Path
    metrics_interval: int
    checks_losses: bool

    @property
    def family(self) -> ModelFamily:
        """Kind of model."""
        return self.model.family

    @property
    def on_cpu(self) -> bool:
        """Whether the run has no CUDA device."""
        return self.device.type == "cpu"

    def with_layers_per_stage(self, split: Split) -> "RunConfig":
        """The same run, its layers split so."""
        return replace(self, parallel=replace(self.parallel, layers_per_stage=split))

    @property
    def divided_layout(self) -> PipelineLayout | None:
        """Of a GPT's layers over the stages, where a layer is divided."""
        split = self.parallel.layers_per_stage
        layout = None
        if split is not None:
            layout = PipelineLayout(
                family=self.model.family,
                encoder_layers=self.model.encoder_layers,
                layers_per_stage=split,
                chunks=self.parallel.chunks,
            )
        return layout if layout is not None and layout.has_halves else None


def t5_split(model: ModelConfig, parallel: ParallelConfig) -> T5Split:
    """How a T5 is cut; raises ConfigError where the layers cannot be split so."""
    return T5Split.of(
        model.encoder_layers,
        model.decoder_layers,
        parallel.pipeline,
        parallel.layers_per_stage,
        chunks=parallel.chunks,
    )
