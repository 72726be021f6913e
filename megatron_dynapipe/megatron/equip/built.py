"""How models come to be: GPTs and HybridModels by Megatron's own builders, staged T5s by a provider of ours."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.base import compose_hooks
from megatron.training.models.dist_utils import build_virtual_pipeline_stages
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import PipelineLayout
from megatron_dynapipe.costing.pattern import with_stages
from megatron_dynapipe.megatron.equip.attention import mark_sinks
from megatron_dynapipe.megatron.equip.experts import equip_experts
from megatron_dynapipe.megatron.equip.halves import OverlappingLayout, drop_halves
from megatron_dynapipe.megatron.models.config import transformer_config
from megatron_dynapipe.megatron.models.hybrid import PlannedHybridStack
from megatron_dynapipe.megatron.models.specs import (
    ATTENTION,
    MLP,
    CoreAttention,
    TENorm,
    core_attention,
    run_classes,
    with_classes,
    without,
)
from megatron_dynapipe.megatron.models.t5_stage import T5Stage, share_weights

ModelProvider = Callable[..., Any]
DecoderOnly = Any
"""What Megatron builds a decoder-only model from: `GPTModelConfig` or `HybridModelConfig`."""


def decoder_only(
    args: argparse.Namespace, layout: PipelineLayout | None = None, config: TransformerConfig | None = None
) -> DecoderOnly:
    """What Megatron builds a GPT or a HybridModel from: as its arguments say, with the core attention and the norms of
    the run.

    Args:
        args: Megatron's, checked.
        layout: of a pipeline that cuts layers, or of a HybridModel, its layout; None leaves it to Megatron's flags.
        config: takes the place of the one that Megatron's arguments describe.
    """
    config = config or transformer_config(args)
    built: DecoderOnly
    if args.hybrid_layer_pattern:
        built = hybrid_config_from_args(args, config)
        built.hybrid_stack_spec = hybrid_layers(config, core_attention(args))
        if layout is not None:
            built.hybrid_layer_pattern = with_stages(args.hybrid_layer_pattern, layout.modules_per_stage)
    else:
        built = gpt_config_from_args(args, config)
        built.rope_scaling_factor = args.rope_scaling_factor  # which Megatron's function leaves out
        built.transformer_layer_spec = partial(gpt_layers, attention=core_attention(args))
        if layout is not None and layout.cuts_layers:
            config.pipeline_model_parallel_layout = OverlappingLayout(layout.modules_per_stage, layout.stages)
    built.pre_wrap_hooks = [drop_halves, _with_experts, mark_sinks]
    return built


def built_chunks(config: DecoderOnly, ends: bool | None = None) -> list[Any]:
    """All chunks of a rank as Megatron's loop builds them, not wrapped; with `ends`, one that has both or neither."""
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if ends is None:
        virtual = config.transformer.virtual_pipeline_model_parallel_size
        chunks = build_virtual_pipeline_stages(builder.build_model, groups, virtual)
    else:
        chunks = [builder.build_model(groups, ends, ends)]
    return list(compose_hooks(config.pre_wrap_hooks)(chunks))


def built_stages(args: argparse.Namespace, family: ModelFamily, layout: PipelineLayout | None = None) -> list[Any]:
    """All chunks that a rank has of any model, not wrapped; a T5 has a layout."""
    if family is ModelFamily.T5:
        assert layout is not None, "a T5 is staged by a layout"
        provide = t5_provider(args, layout)
        return [provide(vp_stage=chunk) for chunk in range(layout.chunks)]
    return built_chunks(decoder_only(args, layout))


def gpt_layers(config: GPTModelConfig, vp_stage: int | None = None, *, attention: CoreAttention) -> Any:
    """Megatron's choice of a stage's layers, with the run's classes."""
    chosen = with_classes(default_layer_spec(config, vp_stage), run_classes(config.transformer, attention))
    if config.transformer.transformer_impl != "local" or isinstance(chosen, TransformerBlockSubmodules):
        return chosen
    # Megatron would choose a final norm, too, whichever its installation has.
    layers = [chosen] * get_num_layers_to_build(config.transformer, vp_stage)
    return TransformerBlockSubmodules(layers, layer_norm=chosen.submodules.input_layernorm)


def hybrid_layers(config: TransformerConfig, attention: CoreAttention) -> ModuleSpec:
    """A HybridModel's modules, from a GPT's layers: Megatron has Transformer Engine's alone, without q/k norms."""
    engine = config.transformer_impl != "local"
    build = get_gpt_layer_with_transformer_engine_spec if engine else get_gpt_layer_local_spec
    build = partial(build, qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention)
    if not engine:
        build = partial(build, normalization=config.normalization)
    classes = run_classes(config, attention)
    dense: Any = with_classes(build(), classes)
    attends = "mla_layer" if config.multi_latent_attention else "attention_layer"
    layers = {attends: without(dense, MLP), "mlp_layer": without(dense, ATTENTION)}
    if experts := config.num_moe_experts:
        sparse = with_classes(build(num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm), classes)
        # Megatron's HybridModel keeps the norm of its experts' layers under its own name.
        layers["moe_layer"] = without(sparse, {**ATTENTION, "sharded_state_dict_keys_map": {}})
    norm = {"norm": TENorm if engine else dense.submodules.input_layernorm}
    return ModuleSpec(module=PlannedHybridStack, params=norm, submodules=HybridStackSubmodules(**layers))


def _with_experts(chunks: list[Any]) -> list[Any]:
    equip_experts(chunks, saved=True)
    return chunks


def t5_provider(args: argparse.Namespace, layout: PipelineLayout) -> ModelProvider:
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
            transformer_config(args, config),
            args=args,
            layout=layout,
            stage=groups.pp.rank() + chunk * layout.stages,
            pg_collection=groups,
        )
        built.append(stage)
        if layout.chunks > 1 and len(built) == layout.chunks:
            share_weights(built)
        return stage

    return provide
