"""How many layers Megatron builds on each virtual stage of a GPT, for the planner."""

import argparse

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training.argument_utils import core_transformer_config_from_args


def gpt_layers_per_stage(args: argparse.Namespace) -> tuple[int, ...]:
    """Layers per virtual stage in model order, as Megatron's flags say.

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
