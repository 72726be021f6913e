"""Flags of the models, and the flags of Megatron that replace them. Imports no Megatron: flags are added first."""

import argparse
from argparse import Namespace
from collections.abc import Sequence

from megatron_dynapipe.cost import even_split
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily

AUTO, EQUAL = "auto", "equal"
"""Splits of layers that are not numbers. `auto` is a wish: it gives way to flags that say more."""


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
        "--dynapipe-activation",
        choices=("gelu_tanh",),
        help="activation in place of Megatron's: GELU by its tanh form, as GPT-2 has it; with --swiglu that of the"
        " gates, as T5 v1.1 has it",
    )
    group.add_argument(
        "--dynapipe-layers-per-stage",
        metavar="N,N,…|auto|equal",
        help="layers of each (virtual) stage in model order, a T5's encoder layers first; auto: planned from costs and"
        " lengths, unless other flags split the layers or stages have several chunks (default: equal)",
    )


def layers_per_stage(args: Namespace) -> tuple[int, ...] | None:
    """Layers of each virtual stage as given; None for an equal or a planned split.

    Raises:
        ConfigError: not numbers of layers.
    """
    given = args.dynapipe_layers_per_stage
    if given in (None, AUTO, EQUAL):
        return None
    words = given.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"expected --dynapipe-layers-per-stage as 5,3, auto or equal, got {given!r}")
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
    if given not in (None, AUTO, EQUAL):
        _check_split_is_alone(args)
    if family is ModelFamily.T5:
        return ["--position-embedding-type", "none"] if _hides_relative(args) else []
    if given in (None, EQUAL):
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


def obstacle_to_auto(args: Namespace) -> str | None:
    """The flag by which a planned split gives way, as it was given; None where the split can be planned."""
    others = (
        *("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"),
        *("num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers"),
        *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
        *("account_for_loss_in_pipeline_split", "dynapipe_layer_to_device"),
    )
    return next((f"--{name.replace('_', '-')} {getattr(args, name)}" for name in others if getattr(args, name)), None)


def _check_split_is_alone(args: Namespace) -> None:
    """Refuse Megatron's flag that splits layers over stages beside numbers of ours."""
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        ours = f"--dynapipe-layers-per-stage {args.dynapipe_layers_per_stage}"
        flag = f"--pipeline-model-parallel-layout {layout}"
        raise ConfigError(f"expected {ours} or {flag}, got both", hint="remove one of them")


def restore(args: Namespace, given: Namespace) -> None:
    """Put back in Megatron's checked arguments what `words_for_megatron` kept from it."""
    if given.position_embedding_type == "relative":
        args.position_embedding_type = "relative"


def _hides_relative(args: Namespace) -> bool:
    return bool(args.position_embedding_type == "relative" and args.transformer_impl == "local")
