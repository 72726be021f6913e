"""How many layers Megatron's flags put on each virtual stage."""

import argparse

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron_dynapipe.errors import ConfigError


def gpt_layers_per_stage(args: argparse.Namespace) -> tuple[int, ...]:
    """A GPT's layers per virtual stage in model order, as Megatron's flags say.

    These are `--num-layers-per-virtual-pipeline-stage`, `--num-virtual-stages-per-pipeline-rank`,
    `--pipeline-model-parallel-layout`, `--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`,
    `--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`. Called once Megatron's
    process groups exist: it looks at them.
    """
    config = core_transformer_config_from_args(args)
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout

    def layers(stage: int, chunk: int | None) -> int:
        if layout is not None:
            return int(layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=stage))
        return int(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))

    return tuple(layers(stage, chunk if chunks else None) for chunk in range(chunks or 1) for stage in range(stages))


def take_t5_layout(args: argparse.Namespace) -> None:
    """Make a T5's `--pipeline-model-parallel-layout` ours: "Ett|t*4L" means 2 and 4 layers, in model order.

    Megatron would hold it against one stack's depth. Its other flags of uneven splits count from a decoder's ends, of
    which a T5 has none in the middle of a pipeline.

    Raises:
        ConfigError: not an embedding, layers and a loss in this order, or one of the other flags.
    """
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
        layers = sum(kind is LayerType.decoder for stage in stages for kind in stage)
        line = [LayerType.embedding, *[LayerType.decoder] * layers, LayerType.loss]
        if [kind for stage in stages for kind in stage] != line:
            raise ConfigError(
                f"expected --pipeline-model-parallel-layout of a T5 as E, layers and L, as Ett|ttL, got {layout!r}"
            )
        args.dynapipe_layers_per_stage = ",".join(str(stage.count(LayerType.decoder)) for stage in stages)
        args.pipeline_model_parallel_layout = None
    for name in (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} does not say how the layers of a T5 lie over the stages",
                hint="pass the layers of every stage: --dynapipe-layers-per-stage 5,3",
            )
