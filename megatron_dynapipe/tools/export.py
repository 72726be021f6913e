"""A planned split of layers as Megatron's own flags, for teams that take no runtime of this package."""

from collections.abc import Sequence

from megatron_dynapipe.choosing.layer_split import choose_layer_split
from megatron_dynapipe.choosing.planners import tables_of
from megatron_dynapipe.core.costs import MLP
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import CostModel, LayerSplit, even_layer_split
from megatron_dynapipe.costing.pattern import megatron_layout, pattern_of
from megatron_dynapipe.sampling import GlobalBatch

LAYOUT = "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"


def megatron_flags(
    settings: PlannerSettings, cost_model: CostModel, batches: Sequence[GlobalBatch]
) -> tuple[dict[str, str], str]:
    """Megatron's flags of the planned stages, for GPTModel and for HybridModel, each with its value.

    Args:
        settings: the plans'; GPTModel takes whole layers, so that a split that divides some is chosen anew for it.
        cost_model: what layers cost.
        batches: that the split of whole layers is chosen for.

    Returns:
        The flags, and what people have to know of them: empty where they are the planned split.

    Raises:
        ConfigError: a T5, which Megatron does not divide over a pipeline.
        PlanningError: none of the batches can be planned with whole layers.
    """
    if settings.model.decoder:
        raise ConfigError(
            "Megatron divides no T5 over a pipeline: there is nothing to export", hint="leave out --export"
        )
    layout = settings.layout
    state = tables_of(settings, cost_model)[0].state
    flags = {"--pipeline-model-parallel-size": str(settings.pipeline_parallel)}
    pattern = {PATTERN: pattern_of(layout, experts=state.expert_kind == MLP)}
    if not settings.model.layers_divide:
        return flags | pattern, ""
    whole: LayerSplit = layout.layers_per_stage
    note = ""
    if layout.cuts_layers:
        layers = settings.model.layers
        stages = settings.pipeline_parallel
        chunks = settings.chunks if len(whole) <= layers else 1
        begun = settings.with_layers_per_stage(even_layer_split(layers, stages * chunks))
        whole = choose_layer_split(begun, cost_model, batches, halves=False)
        planned, chosen = (",".join(map(str, split)) for split in (layout.layers_per_stage, whole))
        note = f"{LAYOUT} is the best split of whole layers, {chosen}; the planned one, {planned}, is the pattern's"
    return flags | {LAYOUT: megatron_layout(whole)} | pattern, note
