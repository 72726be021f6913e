"""Stages that begin or end within a layer, in models whose builder knows whole layers.

    stage 0    layer 0   layer 1   layer 2: attention, ~MLP~
    stage 1                        layer 2: ~attention~, MLP   layer 3

Megatron asks one object how many layers a stage builds, and from which on. One whose stages overlap has both neighbours
build the layer that lies between them; each then drops the half that it does not hold, before any weights are loaded.
So names, numbers and checkpoints are the same as for whole layers.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import ModuleSplit
from megatron_dynapipe.costing.pattern import STAGE_END, megatron_layout
from megatron_dynapipe.megatron.hooks.originals import Replacement
from megatron_dynapipe.megatron.models.specs import ATTENTION, MLP
from megatron_dynapipe.runtime.control_group import ControlGroup

_HALVES = 2


class OverlappingLayout(PipelineParallelLayerLayout):
    """A layout whose neighbouring stages may both build a layer.

    Args:
        modules: the attentions and MLPs of every virtual stage, in model order.
        stages: pipeline ranks.
    """

    def __init__(self, modules: ModuleSplit, stages: int) -> None:
        self.ranges = [range(start, end) for start, end in pairwise(accumulate(modules, initial=0))]
        rows = [["decoder"] * (-(-part.stop // _HALVES) - part.start // _HALVES) for part in self.ranges]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, stages)
        self.input_data = megatron_layout(
            tuple(count / _HALVES for count in modules)
        )  # what a checkpoint's recipe says

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Whether layers of multi-token prediction have a stage of their own; there are none."""
        assert self.ranges[-1].stop == _HALVES * num_layers, "a split of this model"
        assert not mtp_num_layers, "refused before"
        return False

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """The first layer that a stage builds."""
        return self.modules(vp_stage, pp_rank).start // _HALVES

    def modules(self, vp_stage: int | None = None, pp_rank: int | None = None) -> range:
        """The modules that a virtual stage holds; of this rank by default."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        stages: int = self.pipeline_model_parallel_size
        return self.ranges[(vp_stage or 0) * stages + rank]


def modules_of_text(text: str) -> ModuleSplit:
    """The modules of every virtual stage in a layout that Megatron or `megatron_layout` wrote: "Ett,|ttL" is (5, 3)."""
    stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    ends = [_HALVES * layers for layers in accumulate(stage.count(LayerType.decoder) for stage in stages)]
    if len(parts := text.split(STAGE_END)) == len(ends):  # none are repeated
        ends = [end + part.endswith(",") for end, part in zip(ends, parts, strict=True)]
    return tuple(end - start for start, end in pairwise([0, *ends]))


def drop_halves(chunks: list[Any]) -> list[Any]:
    """Drop from built chunks, in which no weights have been loaded, what an overlapping layout has built twice.

    Raises:
        ConfigError: a layer that is to be cut is not Megatron's.
    """
    for chunk in chunks:
        _drop_halves(chunk.decoder)
    return chunks


def _drop_halves(block: Any) -> None:
    layout = block.config.pipeline_model_parallel_layout
    if not isinstance(layout, OverlappingLayout):
        return
    modules = layout.modules(block.vp_stage)
    if modules.start % _HALVES:
        _drop(block.layers[0], ATTENTION)
    if modules.stop % _HALVES:
        _drop(block.layers[-1], MLP)


def modules_held(chunk: object) -> int:
    """The attentions and MLPs of a built chunk; a layer of a HybridModel is one of the two."""
    (inner,) = unwrap_model([chunk])
    if isinstance(inner, HybridModel):
        return len(inner.decoder.layers)
    parts = [part for layer in inner.decoder.layers for part in (layer.self_attention, layer.mlp)]
    return sum(not isinstance(part, IdentityOp) for part in parts)


def modules_per_stage(models: Sequence[object], control: ControlGroup) -> ModuleSplit:
    """Attentions and MLPs of every virtual stage in model order, counted in the models of all ranks."""
    place = parallel_state.get_pipeline_model_parallel_rank()
    counts = [modules_held(model) for model in models]
    rows = {int(row[0]): row[1:].tolist() for row in control.gather(torch.tensor([place, *counts]))}
    return tuple(int(rows[stage][chunk]) for chunk in range(len(models)) for stage in sorted(rows))


def _drop(layer: Any, modules: Any) -> None:
    own = next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))
    if not own.__module__.startswith("megatron.core"):
        raise ConfigError(
            f"expected layers that run their modules as Megatron's do, to be cut in two, got {own.__name__}",
            hint='layers="recipe" leaves layers whole',
        )
    for name, stand_in in modules.items():
        setattr(layer, name, stand_in())
    if modules is MLP:
        layer.is_moe_layer = layer.recompute_mlp = layer.recompute_pre_mlp_layernorm = False
    else:
        layer.recompute_input_layernorm = False


def _reading(from_str: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(from_str)
    def read(layout: str, pipeline_model_parallel_size: int) -> Any:
        modules = modules_of_text(layout)
        if any(count % _HALVES for count in modules):
            return OverlappingLayout(modules, pipeline_model_parallel_size)
        return from_str(layout, pipeline_model_parallel_size)

    return staticmethod(read)


def _building(build_layers: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build_layers)
    def build(block: Any) -> None:
        build_layers(block)
        _drop_halves(block)

    return build


TABLE: tuple[Replacement, ...] = (
    Replacement(
        owner="megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
        name="from_str",
        make=_reading,
        parameters=("layout", "pipeline_model_parallel_size"),
        why="takes no notice of commas, by which a layout says that a stage ends within a layer",
    ),
    Replacement(
        owner="megatron.core.transformer.transformer_block.TransformerBlock",
        name="_build_layers",
        make=_building,
        parameters=("self",),
        why="builds whole layers, whichever function of a checkout's own makes the model",
    ),
)
"""What cuts layers of a model that a patched checkout builds by itself."""
