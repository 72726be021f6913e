"""Any `torch.nn.Module` as pipeline stages: cut points, shared weights, shapes learned on the fly, training steps.

    trace ──► division into stages ──► this rank's part ──► pipeline: micro-batches, instruction lists, gradients

`docs/your-own-model.md` shows how to use it.
"""

from megatron_dynapipe.modules.loader import DynaPipeDataLoader, ModulePlanner, Pad
from megatron_dynapipe.modules.part import ModelPart
from megatron_dynapipe.modules.pipeline import Pipeline, StepResult
from megatron_dynapipe.modules.profile import profile_module
from megatron_dynapipe.modules.split import split_model
from megatron_dynapipe.modules.stage import SharedModule, Stage
from megatron_dynapipe.modules.trace import CutPoint
from megatron_dynapipe.modules.uneven import UnevenPipeline, stage_of_plan

__all__ = [
    "CutPoint",
    "DynaPipeDataLoader",
    "ModelPart",
    "ModulePlanner",
    "Pad",
    "Pipeline",
    "SharedModule",
    "Stage",
    "StepResult",
    "UnevenPipeline",
    "profile_module",
    "split_model",
    "stage_of_plan",
]
