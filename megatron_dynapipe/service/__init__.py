"""The planner process: sampler → planner → store, ahead of training; and the ranks' client."""

from megatron_dynapipe.service.client import PlanClient
from megatron_dynapipe.service.process import NodePlanners, PlannerProcess
from megatron_dynapipe.service.settings import (
    AnalyticCosts,
    MeasuredCosts,
    PlanInputs,
    ServiceSettings,
    SplitSettings,
)
