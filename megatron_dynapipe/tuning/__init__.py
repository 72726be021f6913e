"""Which parallel layout trains a mixture fastest: the space of layouts, bounds that prune it, a best-first search; and
for a layer profile, stages with different numbers of replicas."""

from megatron_dynapipe.tuning.evaluate import StepRates
from megatron_dynapipe.tuning.layer_profile import Layer, LayerProfile, parse_graph_profile, read_graph_profile
from megatron_dynapipe.tuning.orchestrate import OrchestratedStage, Orchestration, orchestrate
from megatron_dynapipe.tuning.search import Progress, tune, tune_segments
from megatron_dynapipe.tuning.space import Candidate, Space, Split, Status, TunedLayout, Tuning, candidates
from megatron_dynapipe.tuning.topology import Topology
from megatron_dynapipe.tuning.validate import (
    Measured,
    layout_file,
    layout_flags,
    measure,
    run_file,
    train_best,
    training_command,
    with_measured,
)

__all__ = [
    "Candidate",
    "Topology",
    "Layer",
    "LayerProfile",
    "Measured",
    "OrchestratedStage",
    "Orchestration",
    "Progress",
    "Space",
    "Split",
    "Status",
    "StepRates",
    "TunedLayout",
    "Tuning",
    "candidates",
    "layout_file",
    "layout_flags",
    "measure",
    "orchestrate",
    "parse_graph_profile",
    "read_graph_profile",
    "run_file",
    "train_best",
    "training_command",
    "tune",
    "tune_segments",
    "with_measured",
]
