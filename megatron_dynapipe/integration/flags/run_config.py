"""One run's configuration as one frozen value: what runs takes it or a part of it, and never Megatron's namespace."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.cost import PipelineLayout, Split
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.integration.flags.resume_record import CheckpointConfig
from megatron_dynapipe.integration.models.config import ModelConfig, StateBytes
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import SamplerSettings, TruncationSide
from megatron_dynapipe.service.settings import PlanInputs
from megatron_dynapipe.store import StoreAddress
from megatron_dynapipe.units import ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run, as it was asked for.

    Attributes:
        model: what is trained.
        inputs: what plans are made from: dataset folder, splits, the planner's settings, costs.
        state: what a parameter's copies take.
        checkpoints: saved and loaded ones.
        in_checkout: whether a patched checkout's own script runs, and builds its own model.
        rank: of this process.
        device: of this rank.
        truncate: where truncated samples lose tokens.
        loss_on: which tokens of a decoder-only sample count; None as the dataset says.
        store: an existing plan store; None starts an embedded one.
        store_bind: address at which an embedded store listens.
        planners: planner processes of the job.
        ahead: iterations planned ahead of training.
        timeout_s: deadline of every wait: for a plan, for a peer, for the planner to start.
        calibrate_s: for how long layers are measured before training; 0 where there is a cost model file, or they
            are not to be.
        layer_costs: arguments that layers' costs depend on.
        reserves_all_memory: whether all that plans may use of a GPU is taken before the first iteration.
        plans_layer_split: whether the layers per stage are yet to be planned.
        notes: what the log says of the settings at the run's start.
        report_folder: where the run's records and pictures go.
        metrics_interval: iterations between two whose numbers are given to Megatron's writers.
        checks_losses: whether a loss that is not finite ends training.
    """

    model: ModelConfig
    inputs: PlanInputs
    state: StateBytes
    checkpoints: CheckpointConfig
    in_checkout: bool
    rank: int
    device: torch.device
    truncate: TruncationSide
    loss_on: LossOn | None
    store: StoreAddress | None
    store_bind: str
    planners: int
    ahead: int
    timeout_s: float
    calibrate_s: float
    layer_costs: Mapping[str, str]
    reserves_all_memory: bool
    plans_layer_split: bool
    notes: tuple[str, ...]
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

    @property
    def data(self) -> Path:
        """Dataset folder."""
        return Path(self.inputs.data_folder)

    @property
    def planner(self) -> PlannerSettings:
        """Settings of the planner: the parallel layout, memory, choices."""
        return self.inputs.planner

    @property
    def sampler(self) -> SamplerSettings:
        """What decides the samples of training iterations."""
        return self.inputs.splits[0].sampler

    def with_layers_per_stage(self, split: Split) -> "RunConfig":
        """The same run, its layers split so."""
        planner = msgspec.structs.replace(self.planner, layers_per_stage=split)
        return replace(self, inputs=msgspec.structs.replace(self.inputs, planner=planner))

    @property
    def divided_layout(self) -> PipelineLayout | None:
        """Of a GPT's layers over the stages, where a layer is divided."""
        return self.planner.layout if self.planner.layout.has_halves else None


def resumed_inputs(inputs: PlanInputs, iteration: int) -> PlanInputs:
    """What plans are made from where training goes on from an iteration, which a checkpoint sets."""
    train, *others = inputs.splits
    left = max((train.iterations or 0) - iteration, 0)
    train = msgspec.structs.replace(train, first_iteration=iteration, iterations=left)
    return msgspec.structs.replace(inputs, splits=(train, *others))
