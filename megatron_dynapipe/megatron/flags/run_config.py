"""One run's configuration as one frozen value: what plans are made from, next to Megatron's own two objects."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.choosing.trial import unordered_because
from megatron_dynapipe.core.costs import EXPERT_MLP, MLP
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import LayerSplit, ModelShape
from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.flags.checkpoints import Checkpoints
from megatron_dynapipe.megatron.flags.planning_flags import AUTO
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service.settings import PlanInputs
from megatron_dynapipe.store import StoreAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The places that a run's plans and samples come from, and how long it waits for them, in any host.

    Attributes:
        loss_on: which tokens of a decoder-only sample count; None as the dataset says.
        store: an existing plan store; None starts an embedded one.
        store_bind: address at which an embedded store listens.
        planner_cores: most cores of each node's planner, an iteration each; None for what ranks leave.
        ahead: iterations planned ahead of training; None for as many as the first plan's time asks for.
        timeout_s: deadline of every wait: for a plan, for a peer, for the planner to start.
        report_folder: where the run's records and pictures go, and the logs of its store and planners.
    """

    loss_on: LossOn | None = None
    store: StoreAddress | None
    store_bind: str
    planner_cores: int | None
    ahead: int | None
    timeout_s: float
    report_folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of Megatron's own loop, as it was asked for.

    Attributes:
        args: Megatron's checked arguments, and ours among them.
        transformer: Megatron's configuration of the model.
        shape: sizes of the model; computed costs have them as well, for planners, which have nothing else of the run.
        inputs: what plans are made from: dataset folder, splits, the planner's settings, costs.
        files: digests of the dataset's files as its manifest had them when flags were read.
        device: this rank's.
        sources: where plans and samples come from.
        notes: what the log says of the settings at the run's start.
    """

    args: argparse.Namespace
    transformer: TransformerConfig
    shape: ModelShape
    inputs: PlanInputs
    files: Mapping[str, FileDigests]
    device: torch.device
    sources: Sources
    notes: tuple[str, ...]

    @property
    def family(self) -> ModelFamily:
        """Kind of model."""
        return self.shape.family

    @property
    def checkpoints(self) -> Checkpoints:
        """Saved and loaded ones."""
        return Checkpoints(self.args, self.transformer)

    @property
    def calibrate_s(self) -> float:
        """For how long layers are measured before training; 0 where there is a cost model file, or they are not to."""
        seconds: float = self.args.dynapipe_calibrate
        return 0.0 if self.args.dynapipe_cost_model is not None else seconds

    @property
    def plans_layer_split(self) -> bool:
        """Whether the layers per stage are yet to be planned."""
        return bool(self.args.dynapipe_layers_per_stage == AUTO)

    @property
    def plans_chunks(self) -> bool:
        """Whether the virtual stages of a rank are, too: no flag says how many there are."""
        args = self.args
        if not self.plans_layer_split or args.dynapipe_chunks is not None or args.hybrid_layer_pattern:
            return False
        return not unordered_because(args.dynapipe_schedule, stages=args.pipeline_model_parallel_size, chunks=2)

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
