"""Flags of the models, and what Megatron is told in their place. Imports no Megatron: flags are added before it is."""

import argparse
from argparse import Namespace

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
        " lengths, for a T5 (default: equal)",
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

    A GPT's layers per stage become Megatron's `--pipeline-model-parallel-layout`. Relative positions are kept from
    Megatron, which knows of no local attention that has them: see `restore`.

    Raises:
        ConfigError: a split that a GPT cannot have.
    """
    if family is ModelFamily.T5:
        return ["--position-embedding-type", "none"] if _hides_relative(args) else []
    if args.dynapipe_layers_per_stage == AUTO:
        raise ConfigError(
            "--dynapipe-layers-per-stage auto plans the split of a T5; a GPT's is part of Megatron's set-up",
            hint="choose one with `megatron-dynapipe plan --layer-split auto` and pass its numbers",
        )
    split = layers_per_stage(args)
    if split is None:
        return []
    stages = ["t" * layers for layers in split]
    return ["--pipeline-model-parallel-layout", f"E{'|'.join(stages)}L"]


def restore(args: Namespace, given: Namespace) -> None:
    """Put back in Megatron's checked arguments what `words_for_megatron` kept from it."""
    if given.position_embedding_type == "relative":
        args.position_embedding_type = "relative"


def _hides_relative(args: Namespace) -> bool:
    return bool(args.position_embedding_type == "relative" and args.transformer_impl == "local")
