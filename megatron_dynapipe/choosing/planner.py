"""A planner of tables of costs, with the ways that a run's settings allow, whatever the tables are of."""

from collections.abc import Sequence

from megatron_dynapipe.core.costs import CostTables, IntArray
from megatron_dynapipe.core.network import Links
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing.links import links_between
from megatron_dynapipe.ways import ways_of
from megatron_dynapipe.ways.rules import RULES


def planner_with(
    settings: PlannerSettings, tables: Sequence[CostTables], model_state_bytes: IntArray, *, costs_digest: str
) -> Planner:
    """The planner of a run.

    Args:
        settings: model, layout, memory, choices.
        tables: what modules cost, under every recompute mode of the settings.
        model_state_bytes: of parameters, gradients and optimizer states on every pipeline rank: int64[stages].
        costs_digest: of what the tables were made from.

    Raises:
        InfeasibleError: a stage's model state alone exceeds the memory limit.
    """
    return Planner(
        settings,
        tables=tables,
        links=links_of(settings),
        model_state_bytes=model_state_bytes,
        ways=ways_of(settings),
        rules=RULES,
        costs_digest=costs_digest,
    )


def links_of(settings: PlannerSettings, virtual_stages: int | None = None) -> Links:
    """The links between the virtual stages of the settings, or between so many."""
    return links_between(
        settings.network,
        virtual_stages=settings.layout.virtual_stages if virtual_stages is None else virtual_stages,
        stages=settings.pipeline_parallel,
        ranks_per_stage=settings.data_parallel * settings.tensor_parallel,
        tensor_parallel=settings.tensor_parallel,
        sequence_parallel=settings.sequence_parallel,
        scatter_gather=settings.scatter_gather,
    )
