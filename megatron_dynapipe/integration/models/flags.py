"""Flags of the models, and the flags of Megatron that replace them. Imports no Megatron: flags are added first."""

import argparse
from argparse import Namespace
from collections.abc import Sequence

from megatron_dynapipe.cost import even_split
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily

AUTO = "auto"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--dynapipe-attention",
        choices=("megatron", "sdpa"),
        default="sdpa",
        help="core attention of --transformer-impl local: Megatron's unfused one, or one over PyTorch's"
        " scaled_dot_product_attention (default)",
    )
    group.add_argument(
        "--dynapipe-layers-per-stage",
        metavar="N,N,…|auto",
        help="layers of each (virtual) stage in model order, a T5's encoder layers first; auto: planned from costs and"
        " lengths (default: equal)",
    )


def layers_per_stage(args: Namespace) -> tuple[int, ...] | None:
    """Layers of each virtual stage as given; None for an equal or a planned split.

    Raises:
        ConfigError: not numbers of layers.
    """
    given = args.dynapipe_layers_per_stage
    if given is None or given == AUTO:
        return None
    words = given.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"expected --dynapipe-layers-per-stage as 5,3 or auto, got {given!r}")
    return tuple(int(word) for word in words)


def words_for_megatron(args: Namespace, family: ModelFamily) -> list[str]:
    """Words for the command line that follow from parsed flags; later ones win.

    A GPT's layers per stage become Megatron's `--pipeline-model-parallel-layout`; a split that is yet to be planned
    begins even. Relative positions are kept from Megatron, which knows of no local attention that has them: see
    `restore`.

    Raises:
        ConfigError: another flag splits the layers too, or there are no numbers of layers.
    """
    given = args.dynapipe_layers_per_stage
    if given is not None:
        _check_split_is_alone(args, planned=given == AUTO)
    if family is ModelFamily.T5:
        return ["--position-embedding-type", "none"] if _hides_relative(args) else []
    if given is None:
        return []
    if given == AUTO:
        split: tuple[int, ...] | None = even_split(args.num_layers, args.pipeline_model_parallel_size)
    else:
        split = layers_per_stage(args)
    assert split is not None
    return ["--pipeline-model-parallel-layout", megatron_layout(split)]


def megatron_layout(split: Sequence[int]) -> str:
    """Layers per virtual stage in the letters of `--pipeline-model-parallel-layout`: (2, 1) is "Ett|tL"."""
    stages = ["t" * layers for layers in split]
    return f"E{'|'.join(stages)}L"


def _check_split_is_alone(args: Namespace, *, planned: bool) -> None:
    """Refuse Megatron's flags that split layers over stages beside ours."""
    others = {"--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout}
    if planned:
        others["--num-layers-per-virtual-pipeline-stage"] = args.num_layers_per_virtual_pipeline_stage
        others["--num-virtual-stages-per-pipeline-rank"] = args.num_virtual_stages_per_pipeline_rank
    for flag, value in others.items():
        if value is not None:
            ours = f"--dynapipe-layers-per-stage {args.dynapipe_layers_per_stage}"
            raise ConfigError(f"expected {ours} or {flag} {value}, got both", hint="remove one of them")


def restore(args: Namespace, given: Namespace) -> None:
    """Put back in Megatron's checked arguments what `words_for_megatron` kept from it."""
    if given.position_embedding_type == "relative":
        args.position_embedding_type = "relative"


def _hides_relative(args: Namespace) -> bool:
    return bool(args.position_embedding_type == "relative" and args.transformer_impl == "local")
