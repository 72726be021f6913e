"""Model providers for Megatron's `pretrain`.

A provider is called once per chunk as `provider(pre_process=…, post_process=…, vp_stage=…, config=…, pg_collection=…)`
and returns the plain module; Megatron wraps it.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from megatron_dynapipe.costing import PipelineLayout, stage_modules
from megatron_dynapipe.costing.pattern import with_stages
from megatron_dynapipe.integration.models.config import ModelConfig
from megatron_dynapipe.integration.models.norms import local_norm
from megatron_dynapipe.integration.models.specs import TENorm, engine_layer, hybrid_stack, layers_of, local_layer
from megatron_dynapipe.integration.models.t5_stage import T5Stage, share_weights

ModelProvider = Callable[..., Any]


def t5_provider(model: ModelConfig, layout: PipelineLayout) -> ModelProvider:
    """A provider of T5 stages; pass `t5_stage.embedding_ranks` to `pretrain` too, for words and positions."""
    built: list[T5Stage] = []

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> T5Stage:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        chunk = vp_stage or 0
        if chunk == 0:
            built.clear()
        stage = T5Stage(
            model.transformer_config(config),
            model=model,
            layout=layout,
            stage=groups.pp.rank() + chunk * layout.stages,
            pg_collection=groups,
        )
        built.append(stage)
        if layout.chunks > 1 and len(built) == layout.chunks:
            share_weights(built)
        return stage

    return provide


def gpt_provider(model: ModelConfig, layout: PipelineLayout | None = None) -> ModelProvider:
    """A provider of Megatron's own `GPTModel`, with Megatron's local layers or Transformer Engine's.

    Args:
        model: what it is made of.
        layout: of a pipeline that cuts layers; without one, stages have the layers that Megatron's flags say.
    """

    def build(config: TransformerConfig, groups: ProcessGroupCollection, chunk: int | None, **shared: Any) -> GPTModel:
        layers = gpt_layers(model, config)
        stage = groups.pp.rank()
        if layout is not None:
            modules = stage_modules(layout)[stage + (chunk or 0) * layout.stages].encoder
            layers = layers_of(modules, layers)
        else:
            first = get_transformer_layer_offset(config, chunk, stage)
            layers = layers[first : first + get_num_layers_to_build(config, chunk, stage)]
        if model.rope_scaling is not None:
            shared["rope_scaling_factor"] = model.rope_scaling
        return GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layers, layer_norm=_final_norm(model)),
            rope_scaling=model.rope_scaling is not None,
            **shared,
        )

    return _decoder_only(model, build)


def hybrid_provider(model: ModelConfig, layout: PipelineLayout) -> ModelProvider:
    """A provider of Megatron's HybridModel, of the layers that a GPT has; as `gpt_provider`."""

    def build(
        config: TransformerConfig, groups: ProcessGroupCollection, chunk: int | None, **shared: Any
    ) -> HybridModel:
        sparse = _layer(model, config) if model.experts is not None else None
        return HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack(_layer(model), sparse, _final_norm(model)),
            hybrid_layer_pattern=with_stages(model.pattern, layout.modules_per_stage),
            **shared,
        )

    return _decoder_only(model, build)


def _decoder_only(model: ModelConfig, build: Callable[..., GPTModel | HybridModel]) -> ModelProvider:
    """A provider of what `build` makes of configuration, groups, chunk and what both models take besides layers."""

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> GPTModel | HybridModel:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        part = build(
            model.transformer_config(config),
            groups,
            vp_stage,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
            vocab_size=model.vocabulary,
            max_sequence_length=model.max_positions,
            fp16_lm_cross_entropy=model.fp16_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type=model.positions.kind,
            rotary_percent=model.positions.rotary_percent,
            rotary_base=model.positions.rotary_base,
            seq_len_interpolation_factor=model.positions.rotary_interpolation,
        )
        mark_sinks(part)
        return part

    return provide


def mark_sinks(model: nn.Module) -> None:
    """Say that attention sinks, one for each head, are divided over tensor-parallel ranks.

    Megatron 0.19 does not, so that the gradient's norm would count those of the first rank alone.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("core_attention.softmax_offset") and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def gpt_layers(model: ModelConfig, config: TransformerConfig) -> list[ModuleSpec]:
    """All layers of a GPT: dense ones, and those of experts that `--moe-layer-freq` says."""
    if not config.num_moe_experts:
        return [_layer(model)] * config.num_layers
    dense = _layer(model)
    sparse = _layer(model, config)
    with_experts = (model.experts and model.experts.layers) or range(config.num_layers)
    return [sparse if number in with_experts else dense for number in range(config.num_layers)]


def _layer(model: ModelConfig, of_experts: TransformerConfig | None = None) -> ModuleSpec:
    experts = of_experts and of_experts.num_moe_experts
    grouped = bool(of_experts and of_experts.moe_grouped_gemm)
    if model.transformer_engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=model.qk_layernorm, num_experts=experts, moe_grouped_gemm=grouped
        )
        return engine_layer(layer, model.attention)
    layer = get_gpt_layer_local_spec(
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
        num_experts=experts,
        moe_grouped_gemm=grouped,
    )
    return local_layer(layer, _norm(model), model.attention)


def _final_norm(model: ModelConfig) -> Any:
    return TENorm if model.transformer_engine else _norm(model)


def _norm(model: ModelConfig) -> Any:
    return local_norm(
        normalization=model.normalization,
        sequence_parallel=model.sequence_parallel,
        fp32_residual=model.fp32_residual,
    )
