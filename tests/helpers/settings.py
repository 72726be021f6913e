"""Settings of plans in layers, as people count them."""

from collections.abc import Sequence
from typing import Any

from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import model_of_layers


def settings_in_layers(
    family: ModelFamily,
    encoder_layers: int,
    decoder_layers: int = 0,
    *,
    expert_layers: Sequence[int] = (),
    pattern: str = "",
    layers_per_stage: Sequence[float] | None = None,
    **fields: Any,
) -> PlannerSettings:
    """Settings of a model of so many layers, or of a pattern; `fields` are those of `PlannerSettings`."""
    model = model_of_layers(family, encoder_layers, decoder_layers, expert_layers=expert_layers, pattern=pattern)
    modules = None if layers_per_stage is None else model.modules_of(layers_per_stage)
    return PlannerSettings(model=model, modules_per_stage=modules, **fields)
