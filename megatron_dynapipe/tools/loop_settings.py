"""Settings of plans for models that a loop has built, and what such models may not have."""

import os
from collections.abc import Mapping, Sequence

from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.utils import get_model_config, unwrap_model
from torch import nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import GLOO_RULES, cuda_rules
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import LENGTH_MULTIPLE, BatchLayout, Recompute
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.megatron.equip.halves import modules_per_stage
from megatron_dynapipe.megatron.flags.refusals import PASSES, Refusal, first_asked
from megatron_dynapipe.megatron.models.config import model_state_bytes, state_dtype
from megatron_dynapipe.megatron.models.eight_bits import length_multiple
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.tools.batch import planner_settings

_HALVES = 2


def check_models(models: Sequence[nn.Module], *, multiple: int = LENGTH_MULTIPLE) -> None:
    """Refuse models that passes would train wrongly whose rows have multiples of so many positions.

    Raises:
        ConfigError: naming the first reason.
    """
    config = get_model_config(models[0])
    places = config, getattr(models[0], "ddp_config", None)
    rows = f"its products want rows in multiples of {(wanted := length_multiple(config))}, and these have {multiple}"
    table = (*([Refusal("fp8", rows)] if multiple % wanted else []), *PASSES)
    found = first_asked(table, lambda name: next(filter(None, (getattr(place, name, None) for place in places)), None))
    if found is not None:
        name, refusal = found
        raise ConfigError(f"{name} cannot be used with planned passes: {refusal.why}", hint="build the models without")


def settings_of(
    models: Sequence[nn.Module],
    control: ControlGroup,
    costs: CostModel,
    *,
    memory_mb: float,
    layout: BatchLayout,
    given: Mapping[str, object],
) -> PlannerSettings:
    """The settings of one replica's plans, from built models; every rank calls it.

    Raises:
        ConfigError: settings that are not what is expected, or that the models decide.
    """
    config = get_model_config(models[0])
    inner = unwrap_model(list(models))
    if costs.family.is_encoder_decoder or any(isinstance(chunk, HybridModel) for chunk in inner):
        raise ConfigError("expected a GPT, whose layers have an attention and an MLP each, got another model")
    layers = [modules / _HALVES for modules in modules_per_stage(models, control)]
    of_models = {
        "layers_per_stage": tuple(int(each) if each.is_integer() else each for each in layers),
        "hidden_size": config.hidden_size,
        "data_parallel": 1,
        "tensor_parallel": config.tensor_model_parallel_size,
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "chunks": len(models),
        "sequence_parallel": config.sequence_parallel,
        "element_bytes": state_dtype(config).itemsize,
        "micro_batch_layouts": (layout,),
        "model_state_bytes": state_of(models, control),
        "transfers": cuda_rules(os.environ) if next(models[0].parameters()).is_cuda else GLOO_RULES,
        "split_backward": "off",
    }
    if both := sorted(of_models.keys() & given.keys()):
        raise ConfigError(f"expected settings that the built models do not decide, got {', '.join(both)}")
    built_with = (Recompute(config.recompute_granularity or Recompute.NONE),)
    of_plans = planner_settings(
        costs, int(sum(layers)), memory_mb, False, {"recompute": built_with, **of_models, **given}
    )
    if getattr(config, "moe_enable_routing_replay", False) and len(of_plans.recompute) > 1:
        raise ConfigError(
            f"expected one mode of recomputation where routes are replayed, got {', '.join(of_plans.recompute)}",
            hint="backward passes take the routes of micro-batches in turn: a micro-batch may not leave its own",
        )
    return of_plans


def state_of(models: Sequence[nn.Module], control: ControlGroup) -> tuple[int, ...]:
    """Memory of every pipeline rank's weights and, if they train, of gradients and Adam's states."""
    ddp = getattr(models[0], "ddp_config", None)
    shares = ddp is not None and ddp.use_distributed_optimizer
    return model_state_bytes(
        models,
        get_model_config(models[0]),
        control,
        optimizer=None if ddp is None else "adam",
        gradients_in_fp32=ddp is not None and ddp.grad_reduce_in_fp32,
        shards=parallel_state.get_data_parallel_world_size() if shares else 1,
    )
