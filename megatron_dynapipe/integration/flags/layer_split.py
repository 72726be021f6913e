"""How many layers the flags put on each virtual stage: ours, Megatron's, or a split that is planned."""

import argparse
from pathlib import Path

import msgspec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.choosing.layer_split import BATCHES, MORE_CHUNKS, choose_layer_split
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
from megatron_dynapipe.integration.flags.planning_flags import AUTO, EQUAL
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.integration.models.config import megatron_config
from megatron_dynapipe.outputs import say
from megatron_dynapipe.sampling import GlobalBatch, LastBatch, SamplerSettings
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import SplitSettings


def layers_per_stage(args: argparse.Namespace, family: ModelFamily) -> LayerSplit | None:
    """Layers of each virtual stage as Megatron's checked arguments and ours say; None for an equal split.

    A split that is yet to be planned begins even.
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
    return gpt_layers_per_stage(args) if family is ModelFamily.GPT else None


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


def chosen_layer_split(run: RunConfig, *, halves: bool = True) -> LayerSplit:
    """The layers per virtual stage under which the run's first iterations are predicted fastest, the same on all ranks.

    Every sample of the data that fits under the even split fits under the chosen one. Without `halves` layers stay
    whole.

    Raises:
        ConfigError: more stages than layers.
        PlanningError: none of the iterations can be planned.
    """
    batches, epoch = first_batches(run.data, run.sampler)
    planner = run.planner
    even = even_layer_split(planner.model.layers, planner.layout.virtual_stages, halves=halves)
    settings = planner.with_layers_per_stage(even)
    more = MORE_CHUNKS if run.plans_chunks else ()
    return choose_layer_split(settings, run.inputs.costs.load(), batches, to_fit=[epoch], halves=halves, chunks=more)


def first_batches(data: Path, settings: SamplerSettings) -> tuple[list[GlobalBatch], GlobalBatch]:
    """A dataset's first batches, by which layers are split, and all of its samples as one, which have to fit."""
    sampler = split_sampler(data, SplitSettings(name="train", sampler=settings))
    count = sampler.batches.count
    batches = [sampler.batch(iteration) for iteration in range(BATCHES if count is None else min(BATCHES, count))]
    once = msgspec.structs.replace(settings, samples_per_iteration=sampler.samples_per_epoch, task_rates=())
    once = msgspec.structs.replace(once, tokens_per_iteration=None, epochs=None, last_batch=LastBatch.CONTINUE)
    return batches, split_sampler(data, SplitSettings(name="train", sampler=once)).batch(0)


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
    return not args.use_dynapipe and args.hybrid_layer_pattern is None


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
        model = "a model that a patched checkout builds" if args.use_dynapipe else "a HybridModel, of modules"
        raise ConfigError(
            f"expected whole layers on every stage of {model}, got {asked}",
            hint="use the entry scripts of this package with a GPT, or --dynapipe-layers-per-stage auto",
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


def gpt_layers_per_stage(args: argparse.Namespace) -> tuple[int, ...]:
    """A GPT's layers per virtual stage in model order, as Megatron's checked flags say.

    These are `--num-layers-per-virtual-pipeline-stage`, `--num-virtual-stages-per-pipeline-rank`,
    `--pipeline-model-parallel-layout`, `--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`,
    `--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`.
    """
    return layers_of_config(megatron_config(args))


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
