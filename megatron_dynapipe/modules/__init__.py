"""Any `torch.nn.Module` as pipeline stages: cut points, shared weights, shapes learned on the fly, training steps."""

from megatron_dynapipe.modules.cutpoint import CutPoint
from megatron_dynapipe.modules.loader import DynaPipeDataLoader
from megatron_dynapipe.modules.pipeline import Pipeline, StepOutputs, StepResult
from megatron_dynapipe.modules.shared import SharedModule
from megatron_dynapipe.modules.split import split_model
from megatron_dynapipe.modules.stage import Stage

__all__ = [
    "CutPoint",
    "DynaPipeDataLoader",
    "Pipeline",
    "SharedModule",
    "Stage",
    "StepOutputs",
    "StepResult",
    "split_model",
]
