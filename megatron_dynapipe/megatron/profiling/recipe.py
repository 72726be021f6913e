"""Layers of a recipe of Megatron-Bridge to be measured, as the recipe's own provider builds them.

A model of few layers is built, so that the recipe's own attention, norms, experts and kernels are measured, of
whichever family they are. If layers with windows alternate with others, as many are built as alternate: a layer's costs
are the mean of theirs.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import yaml
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

Build = Callable[..., nn.Module]
"""Builds a model of some layers: `build(layers, ends=False, experts=True)`, with embedding and head, with experts."""
MOST = 8
"""Layers that are built together at most."""


def builder_of(recipe: Path, *, tensor_parallel: int) -> tuple[Build, int]:
    """What builds a recipe's layers under the process groups that there are, and how many alternate.

    Args:
        recipe: its saved YAML.
        tensor_parallel: ranks that share a layer.
    """
    described = yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def build(layers: int, *, ends: bool = False, experts: bool = True) -> nn.Module:
        model = _instance(described)
        transformer = getattr(model, "transformer", model)
        of_one_stage = {
            "num_layers": layers,
            "tensor_model_parallel_size": tensor_parallel,
            "moe_layer_freq": [int(experts)] * layers,
            "moe_router_force_load_balancing": experts and bool(transformer.num_moe_experts),  # as costs have it
            **ON_ONE_STAGE,
        }
        if (pattern := getattr(model, "hybrid_layer_pattern", None)) is not None:
            of_one_stage["hybrid_layer_pattern"] = ("*E" if experts and "E" in pattern else "*-") * layers
            of_one_stage["num_layers"] = 2 * layers
        for name, value in of_one_stage.items():
            for place in (model, transformer):
                if hasattr(place, name):
                    setattr(place, name, value)
        if isinstance(skipped := getattr(transformer, "window_attn_skip_freq", None), list):
            transformer.window_attn_skip_freq = skipped[:layers]
        model.finalize()
        return _built(model, groups, ends=ends)

    return build, _alternating(_instance(described))


ON_ONE_STAGE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "mtp_num_layers": None,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
"""What a recipe's model has on one stage that holds all of it, and that computes nothing again."""


def _instance(described: dict[str, Any]) -> Any:
    """The provider, or the configuration, that a recipe's YAML describes."""
    if "_builder_" in described:
        owner, _, name = described["_target_"].rpartition(".")
        return getattr(importlib.import_module(owner), name).from_dict(described)
    from megatron.bridge.utils.instantiate_utils import instantiate

    return instantiate(described)


def _built(model: Any, groups: ProcessGroupCollection, *, ends: bool) -> nn.Module:
    """A model of one stage; without its ends, which some providers ask for on a first and last stage."""
    built: Any
    if hasattr(model, "provide"):
        model._pg_collection = groups
        built = model.provide(pre_process=True, post_process=True)
    else:
        built = model.get_builder_cls()(model).build_model(groups, pre_process=True, post_process=True)
    if not ends:
        del built.embedding, built.output_layer
        for stack in (built, built.decoder):
            stack.pre_process = stack.post_process = False
        for norm in ("final_layernorm", "final_norm"):
            if hasattr(built.decoder, norm):
                setattr(built.decoder, norm, None)
    return cast(nn.Module, built)


def _alternating(model: Any) -> int:
    """How many layers follow one another until they repeat themselves; 1 where all are alike."""
    transformer = getattr(model, "transformer", model)
    if getattr(transformer, "window_size", None) is None:
        return 1
    if (pattern := getattr(model, "interleaved_attn_pattern", None)) is not None:
        return min(int(sum(pattern)), MOST)
    if getattr(model, "attn_logit_softcapping", None):
        return 2
    skipped = getattr(transformer, "window_attn_skip_freq", None) or 1
    return min(int(skipped) if isinstance(skipped, int) else len(skipped), MOST)
