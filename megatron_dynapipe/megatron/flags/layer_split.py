"""How many layers the flags put on each virtual stage: ours, Megatron's, or a split that is planned."""

import argparse

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import LayerSplit, PipelineLayout, even_layer_split, model_of_layers
from megatron_dynapipe.costing.pattern import (
    check_stages,
    kinds_of_pattern,
    layer_split_of_pattern,
    megatron_layout,
    with_stages,
    without_stages,
)
from megatron_dynapipe.megatron.flags.planning_flags import AUTO, EQUAL
from megatron_dynapipe.outputs import say


def layers_per_stage(
    args: argparse.Namespace, family: ModelFamily, transformer: TransformerConfig | None = None
) -> LayerSplit | None:
    """Layers of each virtual stage as Megatron's checked arguments and ours say; None for an equal split.

    A split that is yet to be planned begins even. A GPT has Megatron's configuration, which its flags of layers are in.
    """
    asked: LayerSplit | str = args.dynapipe_layers_per_stage
    if not isinstance(asked, str):
        return asked
    if asked == AUTO:
        layers = sum(layers_of_stacks(args, family))
        stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
        return even_layer_split(layers, stages, halves=_divides_layers(args))
    if args.hybrid_layer_pattern is not None:
        return layer_split_of_pattern(args.hybrid_layer_pattern)
    return None if transformer is None else layers_of_config(transformer)


def layers_of_stacks(args: argparse.Namespace, family: ModelFamily) -> tuple[int, ...]:
    """Layers of each stack of the model."""
    if family is ModelFamily.GPT:
        return (args.num_layers,)
    return args.encoder_num_layers, args.decoder_num_layers or args.encoder_num_layers


def t5_layout(args: argparse.Namespace) -> PipelineLayout:
    """A T5's layers over the pipeline of Megatron's checked arguments; raises ConfigError where they do not fit it."""
    family = ModelFamily.T5
    model = model_of_layers(family, *layers_of_stacks(args, family))
    layer_split = layers_per_stage(args, family)
    chunks = args.virtual_pipeline_model_parallel_size or 1
    stages = args.pipeline_model_parallel_size * chunks
    if layer_split is None:
        return PipelineLayout.equal(model, stages, chunks)
    return PipelineLayout.of_layers(model, layer_split, chunks)


def settle(args: argparse.Namespace, family: ModelFamily) -> None:
    """Let Megatron's parsed flags, before it checks them, say of layers what ours say.

    A GPT's layers per stage become Megatron's `--pipeline-model-parallel-layout`; a split that is yet to be planned
    begins even, and one that other flags keep from being planned is equal for all that ours says.

    Raises:
        ConfigError: another flag splits the layers too.
    """
    if args.hybrid_layer_pattern is not None:
        _settle_pattern(args)
    asked = args.dynapipe_layers_per_stage
    other = other_flag(args)
    args.dynapipe_chunks = args.num_virtual_stages_per_pipeline_rank
    if asked == AUTO and other is not None:
        say(f"layers per stage: not planned (auto), since there is {other}")
        asked = args.dynapipe_layers_per_stage = EQUAL
    layer_split: LayerSplit | None = None if isinstance(asked, str) else asked
    stages = args.pipeline_model_parallel_size
    if layer_split is not None:
        _check(layer_split, args)
    elif asked == AUTO and family is ModelFamily.GPT:
        stages *= args.num_virtual_stages_per_pipeline_rank or 1
        layer_split = even_layer_split(args.num_layers, stages, halves=_divides_layers(args))
    elif args.hybrid_layer_pattern is not None and other is None:
        stages *= args.num_virtual_stages_per_pipeline_rank or 1
        layer_split = PipelineLayout.equal(model_of_layers(family, args.num_layers), stages).layers_per_stage
    if layer_split is None:
        return
    if family is ModelFamily.GPT:
        args.num_virtual_stages_per_pipeline_rank = None  # Megatron takes it or a layout, which says it too.
        set_stages(args, layer_split)
    elif len(layer_split) > stages:
        args.num_virtual_stages_per_pipeline_rank = len(layer_split) // stages


def set_stages(args: argparse.Namespace, layer_split: LayerSplit) -> None:
    """Let Megatron's arguments say a decoder-only model's layers of every virtual stage."""
    if args.hybrid_layer_pattern is not None:
        args.hybrid_layer_pattern = with_stages(args.hybrid_layer_pattern, layer_split)
    else:
        args.pipeline_model_parallel_layout = megatron_layout(layer_split)


def _divides_layers(args: argparse.Namespace) -> bool:
    """Whether a stage may hold one module of a layer: not of a HybridModel, whose layers are modules."""
    return bool(args.hybrid_layer_pattern is None)


def _settle_pattern(args: argparse.Namespace) -> None:
    """Hold a pattern's stages against the other flags, and leave them out of it where those say the same."""
    pattern = args.hybrid_layer_pattern
    asked = args.dynapipe_layers_per_stage
    args.num_layers = len(kinds_of_pattern(pattern))
    if layer_split_of_pattern(pattern) is None:
        return
    check_stages(pattern, stages=args.pipeline_model_parallel_size, split=None if isinstance(asked, str) else asked)
    if not isinstance(asked, str):
        args.hybrid_layer_pattern = without_stages(pattern)


def _check(layer_split: LayerSplit, args: argparse.Namespace) -> None:
    asked = ",".join(map(str, layer_split))
    other = other_flag(args)
    if other is not None:
        raise ConfigError(
            f"expected --dynapipe-layers-per-stage {asked} or {other}, got both", hint="remove one of them"
        )
    stages = args.pipeline_model_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank
    per_rank, rest = divmod(len(layer_split), stages)
    if rest or per_rank != (chunks or (per_rank if stages > 1 else 1)):
        raise ConfigError(
            f"expected layers of {stages} pipeline stages{f' with {chunks} virtual stages each' if chunks else ''} in"
            f" --dynapipe-layers-per-stage, got {len(layer_split)} numbers: {asked}",
            hint="pass a number for every virtual stage, in the order of the model",
        )
    if any(layers % 1 for layers in layer_split) and not _divides_layers(args):
        raise ConfigError(
            f"expected whole layers on every stage of a HybridModel, of modules, got {asked}",
            hint="cut a GPT's layers, or pass --dynapipe-layers-per-stage auto",
        )
    if args.hybrid_layer_pattern is not None and sum(layer_split) != args.num_layers:
        raise ConfigError(
            f"expected the {args.num_layers} modules of --hybrid-layer-pattern {args.hybrid_layer_pattern} in"
            f" --dynapipe-layers-per-stage, got {asked}, which are {sum(layer_split)}"
        )


def other_flag(args: argparse.Namespace) -> str | None:
    """Megatron's flag that splits the layers, as it was given; None where ours may."""
    others = (
        *("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    )
    flags = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in others if getattr(args, name)]
    if layer_split_of_pattern(args.hybrid_layer_pattern or "") is not None:
        flags.append(f"--hybrid-layer-pattern {args.hybrid_layer_pattern}")
    return next(iter(flags), None)


def layers_of_config(config: TransformerConfig) -> tuple[int, ...]:
    """A GPT's layers per virtual stage in model order, as Megatron's configuration says."""
    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout

    def layers(stage: int, chunk: int | None) -> int:
        if layout is not None:
            return int(layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=stage))
        return int(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))

    return tuple(layers(stage, chunk if chunks else None) for chunk in range(chunks or 1) for stage in range(stages))
