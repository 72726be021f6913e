"""What the flags say of layers and stages, as the one flag of ours that says it."""

import argparse
import os

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import placement
from megatron_dynapipe.integration.models import flags as model_flags
from megatron_dynapipe.units import ModelFamily


def layer_split_words(args: argparse.Namespace, family: ModelFamily) -> list[str]:
    """The stage of every layer, if it was given, as the flag of ours that says the same: words for the command line.

    A split that was to be planned, where other flags say how layers lie, is equal for all that ours says.

    Raises:
        ConfigError: it does not list every layer's stage in order, or both flags were given.
    """
    given, ours = args.dynapipe_layer_to_device, args.dynapipe_layers_per_stage
    equal: list[str] = []
    if ours == model_flags.AUTO and (obstacle := model_flags.obstacle_to_auto(args)) is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"layers per stage: not planned (auto), since there is {obstacle}", flush=True)
        ours, equal = None, ["--dynapipe-layers-per-stage", model_flags.EQUAL]
    if given is None:
        return equal
    if ours is not None:
        raise ConfigError("expected --dynapipe-layer-to-device or --dynapipe-layers-per-stage, got both")
    if family is ModelFamily.T5:
        layers = args.encoder_num_layers + (args.decoder_num_layers or args.encoder_num_layers)
    else:
        layers = args.num_layers
    stages = args.pipeline_model_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        chunks = layers // (stages * args.num_layers_per_virtual_pipeline_stage)
    is_told = chunks is not None
    if chunks is None:
        chunks = placement.chunks(given, stages) if family is ModelFamily.GPT else 1
    split = placement.layers_per_stage(given, layers=layers, stages=stages, chunks=chunks)
    if len(set(split)) == 1 and (is_told or chunks == 1):
        return equal
    return ["--dynapipe-layers-per-stage", ",".join(map(str, split))]
