"""One run's configuration as one frozen value: what runs takes it or a part of it, and never Megatron's namespace."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.core.costs import EXPERT_MLP, MLP
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import LayerSplit, ModelShape
from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.flags.checkpoints import Checkpoints
from megatron_dynapipe.megatron.models.config import ModelConfig, StateBytes
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service.settings import PlanInputs
from megatron_dynapipe.store import StoreAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run, as it was asked for.

    Attributes:
        inputs: what plans are made from: dataset folder, splits, the planner's settings, costs.
        files: digests of the dataset's files as its manifest had them when flags were read.
        state: what a parameter's copies take.
        checkpoints: saved and loaded ones.
        loss_on: which tokens of a decoder-only sample count; None as the dataset says.
        store: an existing plan store; None starts an embedded one.
        store_bind: address at which an embedded store listens.
        planners: planner processes of the job: one, or one on each node.
        planner_cores: cores of each planner, which plans so many iterations at once; None for what ranks leave.
        shape: sizes of the model.
        ahead: iterations planned ahead of training.
        timeout_s: deadline of every wait: for a plan, for a peer, for the planner to start.
        calibrate_s: for how long layers are measured before training; 0 where there is a cost model file, or they
            are not to be.
        plans_layer_split: whether the layers per stage are yet to be planned.
        plans_chunks: whether the virtual stages of a rank are, too: no flag says how many there are.
        notes: what the log says of the settings at the run's start.
        report_folder: where the run's records and pictures go.
    """

    model: ModelConfig
    inputs: PlanInputs
    files: Mapping[str, FileDigests]
    state: StateBytes
    checkpoints: Checkpoints
    device: torch.device
    loss_on: LossOn | None
    store: StoreAddress | None
    store_bind: str
    planners: int
    planner_cores: int | None
    shape: ModelShape
    ahead: int
    timeout_s: float
    calibrate_s: float
    plans_layer_split: bool
    plans_chunks: bool
    notes: tuple[str, ...]
    report_folder: Path

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
        """Settings of the sampler of training iterations."""
        return self.inputs.splits[0].sampler

    def with_layers_per_stage(self, layer_split: LayerSplit) -> "RunConfig":
        """The same run, its layers split so, in as many virtual stages of a rank as that makes."""
        planner = self.planner.with_layers_per_stage(layer_split)
        return replace(self, inputs=msgspec.structs.replace(self.inputs, planner=planner))


def label_flops(planner: PlannerSettings, shape: ModelShape) -> float:
    """Floating-point operations, forward and backward, that a position without a label leaves out."""
    layout = planner.layout
    weights = shape.rows(1)
    expert_kind = None if shape.experts is None else EXPERT_MLP if shape.kinds > 1 else MLP
    if len(layout.over_labels(expert_kind, experts=planner.label_experts)) > 1:
        last = shape if layout.modules[-2] == expert_kind else shape.dense
        weights += 2 * last.mlp_width  # in and out
    return 6.0 * shape.hidden * weights
