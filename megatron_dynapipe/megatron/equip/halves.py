"""Stages that begin or end within a layer, in models whose builder knows whole layers.

    stage 0    layer 0   layer 1   layer 2: attention, ~MLP~
    stage 1                        layer 2: ~attention~, MLP   layer 3

Megatron asks one object how many layers a stage builds, and from which on. One whose stages overlap has both neighbours
build the layer that lies between them; each then drops the half that it does not hold, before any weights are loaded.
So names, numbers and checkpoints are the same as for whole layers.
"""

from itertools import accumulate, pairwise
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import ModuleSplit
from megatron_dynapipe.costing.pattern import STAGE_END, megatron_layout
from megatron_dynapipe.megatron.models.specs import ATTENTION, MLP

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
        self.input_data = text_of_modules(modules)  # what a checkpoint's recipe says

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


def text_of_modules(modules: ModuleSplit) -> str:
    """A split as Megatron writes a layout; where a stage ends within a layer, with a comma: "Ett,|ttL" is (5, 3).

    To Megatron commas are cosmetic, and a layer stands where its MLP is.
    """
    whole = megatron_layout(tuple(count / _HALVES for count in modules)).split(STAGE_END)
    cut = [bool(end % _HALVES) for end in accumulate(modules)]
    return STAGE_END.join(stage + "," * within for stage, within in zip(whole, cut, strict=True))


def modules_of_text(text: str) -> ModuleSplit:
    """The modules of every virtual stage in a layout as Megatron or `text_of_modules` writes it."""
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
        layout = chunk.config.pipeline_model_parallel_layout
        if not isinstance(layout, OverlappingLayout):
            continue
        modules = layout.modules(chunk.vp_stage)
        if modules.start % _HALVES:
            _drop(chunk.decoder.layers[0], ATTENTION)
        if modules.stop % _HALVES:
            _drop(chunk.decoder.layers[-1], MLP)
    return chunks


def modules_held(chunk: Any) -> int:
    """The attentions and MLPs of a built chunk; a layer of a HybridModel is one of the two."""
    (inner,) = unwrap_model([chunk])
    if isinstance(inner, HybridModel):
        return len(inner.decoder.layers)
    parts = [part for layer in inner.decoder.layers for part in (layer.self_attention, layer.mlp)]
    return sum(not isinstance(part, IdentityOp) for part in parts)


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
