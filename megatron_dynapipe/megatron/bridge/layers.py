"""Layers and virtual stages of a recipe, chosen before its model is built: Bridge has settled everything else by then.

A recipe keeps whatever layers its pipeline had when it was written, equal ones as a rule, although the last stage also
has the head. Under such a split plans may be slower than packed rows by another.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state

from megatron_dynapipe.choosing.layer_split import MORE_CHUNKS, choose_layer_split
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import ConfigError, PlanningError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import CostModel, LayerSplit, even_layer_split
from megatron_dynapipe.costing.pattern import layer_split_of_pattern, megatron_layout, with_stages, without_stages
from megatron_dynapipe.megatron.bridge.refusals import PATTERNS, of_model, pattern_of
from megatron_dynapipe.megatron.equip.halves import OverlappingLayout, drop_halves, modules_of_text
from megatron_dynapipe.megatron.flags.layer_split import layers_of_config
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.service.first_batches import first_batches
from megatron_dynapipe.service.settings import PlanInputs

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

AUTO, RECIPE = "auto", "recipe"
LAYERS = (AUTO, RECIPE)


def chooses(layers: str) -> bool:
    """Whether layers are chosen; raises ConfigError for a word that says neither."""
    if layers not in LAYERS:
        raise ConfigError(f"expected layers to be one of {', '.join(LAYERS)}, got {layers!r}")
    return layers == AUTO


def layers_of_recipe(config: "ConfigContainer") -> LayerSplit:
    """Layers of every virtual stage as a settled recipe's model will have them; of a HybridModel its modules."""
    pattern = pattern_of(config)
    if not pattern:
        return layers_of_config(of_model(config))
    model = of_model(config)
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    return layer_split_of_pattern(pattern) or even_layer_split(len(without_stages(pattern)), stages, halves=False)


def kept_config(config: "ConfigContainer") -> str:
    """The file of the recipe with which the checkpoint to go on from was saved; empty for none."""
    load = config.checkpoint.load
    if load is None or config.checkpoint.finetune:
        return ""
    step = getattr(config.checkpoint, "ckpt_step", None)
    folders = "iter_*" if step is None else f"iter_{step:07d}"
    found = sorted(Path(load).glob(f"{folders}/run_config.yaml"))
    return str(found[-1]) if found else ""


def layers_of_checkpoint(config: "ConfigContainer", file: str) -> LayerSplit | None:
    """Layers of every virtual stage of a checkpoint: optimizer states load in no others.

    Every rank calls it. None for the recipe's own, and for a checkpoint of other pipeline stages.
    """
    from megatron.bridge.training.utils.checkpoint_utils import read_run_config

    model = read_run_config(file)["model"]
    model = model.get("transformer", model)
    split: LayerSplit | None = None
    if pattern_of(config):
        split = layer_split_of_pattern(next((model[name] for name in PATTERNS if model.get(name)), ""))
    elif isinstance(layout := model.get("pipeline_model_parallel_layout"), str):
        split = tuple(count / 2 for count in modules_of_text(layout))
    return None if split is None or len(split) % of_model(config).pipeline_model_parallel_size else split


def choose(config: "ConfigContainer", inputs: PlanInputs) -> tuple[LayerSplit, str]:
    """The layers of every virtual stage under which the first batches are predicted fastest, and what to say of it.

    Args:
        config: the recipe, settled.
        inputs: what plans are made from, with the recipe's own layers.
    """
    settings = inputs.planner
    costs = inputs.costs.load()
    own = settings.layout.layers_per_stage
    batches, epoch = first_batches(inputs)
    halves = not pattern_of(config)
    more = MORE_CHUNKS if settings.chunks == 1 else ()
    chosen = choose_layer_split(settings, costs, batches, to_fit=[epoch], halves=halves, chunks=more)
    times = [_predicted_ms(settings.with_layers_per_stage(split), costs, batches) for split in (own, chosen)]
    if chosen == own or times[0] is None or times[1] is None or times[1] >= times[0]:
        return own, f"layers per stage: the recipe's, {_said(own)}; no others are predicted faster"
    gain = times[0] / times[1]
    return chosen, f"layers per stage: {_said(chosen)}, predicted {gain:.2f} times as fast as the recipe's {_said(own)}"


@contextlib.contextmanager
def laid_out(config: "ConfigContainer", settings: PlannerSettings, split: LayerSplit) -> Iterator[None]:
    """For the length of a block, have a settled recipe build these layers on every virtual stage."""
    model = of_model(config)
    chunks = len(split) // settings.pipeline_parallel
    layout: dict[str, Any] = {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
    if pattern := pattern_of(config):
        name = next(name for name in PATTERNS if getattr(config.model, name, None) == pattern)
        changed_pattern = changed(config.model, **{name: with_stages(pattern, split)})
    else:
        changed_pattern = changed(model, pipeline_model_parallel_layout=_layout(settings, split), **_unset(model))
    before = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    with changed(model, **layout), changed_pattern, before_weights(config.model, drop_halves):
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        try:
            yield
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(before)


def _layout(settings: PlannerSettings, split: LayerSplit) -> Any:
    stages = settings.pipeline_parallel
    if any(layers % 1 for layers in split):
        return OverlappingLayout(settings.model.modules_of(split), stages)
    return OverlappingLayout.from_str(megatron_layout(split), stages)


def _unset(model: Any) -> dict[str, Any]:
    """Numbers of layers that may not stand next to a layout."""
    numbers = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    switches = [f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")]
    unset: dict[str, Any] = dict.fromkeys(numbers)
    return unset | dict.fromkeys(switches, False)


@contextlib.contextmanager
def before_weights(model: Any, hook: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """For the length of a block, have a function see built chunks before Bridge loads weights and puts adapters in."""
    if hasattr(model, "register_pre_wrap_hook"):
        model.register_pre_wrap_hook(hook, prepend=True)
        hooks: list[Any] = model._pre_wrap_hooks
    else:
        hooks = model.pre_wrap_hooks
        hooks.insert(0, hook)
    try:
        yield
    finally:
        hooks.remove(hook)


def _predicted_ms(settings: PlannerSettings, costs: CostModel, batches: Sequence[GlobalBatch]) -> float | None:
    """Predicted time of batches, all together; None where one has no plan."""
    try:
        planner = planner_of(settings, costs)
        return sum(planner.plan(batch, 0).totals.predicted_ns for batch in batches) / 1e6
    except PlanningError:
        return None


def _said(split: LayerSplit) -> str:
    return ",".join(f"{layers:g}" for layers in split)


@contextlib.contextmanager
def changed(owner: Any, **values: object) -> Iterator[None]:
    """Set attributes for the length of a block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
