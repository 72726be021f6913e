"""Planners of runs: a cost model's tables under a run's settings, and the ways that these allow.

Whatever makes or changes tables stands here, on this side of the planner, which reads them.
"""

from collections.abc import Sequence

import numpy as np

from megatron_dynapipe.choosing.planner import planner_with
from megatron_dynapipe.core.costs import ATTENTION, EXPERT_MLP, CostTables, IntArray
from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing.experts import with_expert_parallel
from megatron_dynapipe.costing.model import CostModel
from megatron_dynapipe.costing.pattern import each_alone
from megatron_dynapipe.costing.state import model_state_bytes


def planner_of(settings: PlannerSettings, cost_model: CostModel) -> Planner:
    """The planner of a run.

    Args:
        settings: model, layout, memory, choices.
        cost_model: what layers cost.

    Raises:
        CostModelError: the cost model is of another kind of model or another hidden size, or lacks a table that the
            settings ask for.
        InfeasibleError: a stage's model state alone exceeds the memory limit.
    """
    return planner_over(settings, tables_of(settings, cost_model), costs_digest=cost_model.digest)


def planner_over(settings: PlannerSettings, tables: Sequence[CostTables], *, costs_digest: str) -> Planner:
    """The planner of a run whose modules cost what `tables` say; raises InfeasibleError as `planner_of` does."""
    return planner_with(settings, tables, model_state_of(settings, tables), costs_digest=costs_digest)


def model_state_of(settings: PlannerSettings, tables: Sequence[CostTables]) -> IntArray:
    """Memory of every pipeline rank's parameters, gradients and optimizer states: int64[stages]."""
    if settings.model_state_bytes is not None:
        return np.array(settings.model_state_bytes, np.int64)
    states = [
        model_state_bytes(
            settings.layout,
            under_mode.state,
            data_parallel=settings.data_parallel,
            distributed_optimizer=settings.distributed_optimizer,
        )
        for under_mode in tables
    ]
    return np.asarray(np.stack(states).max(axis=0), np.int64)


def tables_of(settings: PlannerSettings, cost_model: CostModel) -> tuple[CostTables, ...]:
    """Modules' costs under every recompute mode of the settings; raises CostModelError as `planner_of` does."""
    family = settings.model.family
    if cost_model.family is not family:
        raise CostModelError(
            f"expected a cost model of a {family} model, got {cost_model.name} of a {cost_model.family}"
        )
    if cost_model.hidden_size not in (None, settings.hidden_size):
        raise CostModelError(
            f"expected costs of a model of hidden size {settings.hidden_size}, {cost_model.name} was measured at"
            f" {cost_model.hidden_size}",
            hint="give the hidden size of the measured model, or measure this one with `megatron-dynapipe profile`",
        )
    tables = tuple(_tables_under(settings, cost_model, mode) for mode in settings.recompute)
    layout = settings.layout
    if layout.cuts_layers and not all(under_mode.division for under_mode in tables):
        asked = f"layer split of {layout.layers_per_stage}" if layout.model.layers_divide else "pattern of them"
        raise CostModelError(
            f"expected costs of attention and MLP apart, for a {asked};"
            f" {cost_model.name} does not hold them, nor the sizes of the model by which a layer's are divided",
            hint="give whole layers to a GPT, or measure the model with `megatron-dynapipe profile`",
        )
    return tables


def _tables_under(settings: PlannerSettings, cost_model: CostModel, recompute: Recompute) -> CostTables:
    """Modules' costs under the layout, tokens' way to experts on other ranks included."""
    tables = cost_model.tables(tensor_parallel=settings.tensor_parallel, recompute=recompute)
    if ATTENTION in tables.kinds and not settings.model.layers_divide:
        tables = each_alone(tables)
    kinds = set(tables.kinds)
    with_experts = settings.model.layers_with_experts
    if not set(settings.model.modules) <= kinds or (EXPERT_MLP in kinds) != bool(with_experts):
        model = f"experts in layers {with_experts}" if with_experts else "layers of one kind"
        raise CostModelError(f"expected costs of a model with {model}, got another's: {cost_model.name}")
    return with_expert_parallel(
        tables,
        settings.network,
        recompute,
        ranks=settings.expert_parallel,
        tensor_parallel=settings.tensor_parallel,
        imbalance=settings.expert_imbalance,
    )
