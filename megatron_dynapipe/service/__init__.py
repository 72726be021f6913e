"""The planner process: sampler → planner → store, ahead of training; and a node's source of plans."""

from megatron_dynapipe.service.process import PlannerProcess
from megatron_dynapipe.service.settings import (
    AnalyticCosts,
    MeasuredCosts,
    PlanInputs,
    ServiceSettings,
    SplitSettings,
)
from megatron_dynapipe.service.source import PlanSource
