"""What a run's plans may choose: layouts, pieces, halves of backward passes, the order of passes.

Layouts of micro-batches are padded rows, packed ones, or whichever the plan finds better:

--dynapipe-layout    nothing in the way    no fast kernel        a part that cannot
auto                 padded, packed        padded, said once     padded, said once
packed               packed                packed                refused
padded               padded                padded                padded
"""

import argparse
from collections.abc import Sequence
from typing import Literal

import torch
from megatron.core.utils import is_te_min_version

from megatron_dynapipe.choosing.trial import unordered_because
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.problem import SplitBackward
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.megatron.flags.planning_flags import ADAPTIVE
from megatron_dynapipe.megatron.models import eight_bits
from megatron_dynapipe.megatron.models.packed_attention import HEAD_SIZE_MULTIPLE, LEAST_CAPABILITY, MAX_HEAD_SIZE
from megatron_dynapipe.megatron.models.relative_attention import LEAST_HEAD_SIZE
from megatron_dynapipe.megatron.models.specs import HAVE_TRANSFORMER_ENGINE, engine_attention, special_attention
from megatron_dynapipe.runtime.kernel_compiler import missing_for_kernels

FLAG = "--dynapipe-layout"

Slices = int | Literal["auto", "off"]
"""Whether long samples are cut, as `PlannerSettings.slices`."""


type Layouts = tuple[tuple[BatchLayout, ...], str]
"""The layouts that micro-batches may have, and why not packed where that was left open."""

type Backward = tuple[SplitBackward, str]
"""Whether plans may divide backward passes, and why not where that was left open."""


def describe(layouts: Layouts) -> str:
    """The layouts, for a run's log."""
    allowed, reason = layouts
    if reason:
        return f"padded ({reason})"
    return " or ".join(allowed) + (", whichever a plan finds faster" if len(allowed) > 1 else "")


def batch_layouts(args: argparse.Namespace, *, on_cpu: bool) -> Layouts:
    """The layouts that a run's flags ask for and its model takes.

    Raises:
        ConfigError: packed rows are asked for, and a part of the model cannot take them.
    """
    if args.dynapipe_layout == BatchLayout.PADDED:
        return (BatchLayout.PADDED,), ""
    impossible = first_reason(_cannot_pack(args, on_cpu=on_cpu))
    if args.dynapipe_layout == BatchLayout.PACKED:
        if impossible:
            raise ConfigError(f"{FLAG} packed cannot be honoured: {impossible}", hint=f"pass {FLAG} auto or padded")
        return (BatchLayout.PACKED,), ""
    if reason := impossible or first_reason(_packs_slowly(args, on_cpu=on_cpu)):
        return (BatchLayout.PADDED,), reason
    return (BatchLayout.PADDED, BatchLayout.PACKED), ""


def slices(args: argparse.Namespace, family: ModelFamily, layouts: Layouts) -> Slices:
    """Whether plans may cut long samples: "auto", "off", or the most positions of a piece.

    Raises:
        ConfigError: pieces are asked for, and the model cannot take them.
    """
    asked: Slices = args.dynapipe_slices
    reason = first_reason(
        (
            (family.is_encoder_decoder, "every position of a T5's encoder attends to all of them"),
            (
                bool(getattr(args, "num_experts", None)) and "seq_aux_loss" in args.moe_router_load_balancing_type,
                "seq_aux_loss is of whole samples",
            ),
            (
                args.dynapipe_schedule != ADAPTIVE,
                f"--dynapipe-schedule {args.dynapipe_schedule} does not keep the order of pieces",
            ),
            (
                BatchLayout.PACKED not in layouts[0],
                f"pieces run in packed rows: {layouts[1] or FLAG + ' padded'}",
            ),
        )
    )
    if not reason or asked == "off":
        return asked
    if asked == "auto":
        return "off"
    flag = "--dynapipe-slices"
    raise ConfigError(f"{flag} {asked} cannot be honoured: {reason}", hint=f"pass {flag} auto or off")


def context_teams(args: argparse.Namespace) -> int:
    """The most replicas of a team; raises ConfigError where attention of members would drop weights."""
    most: int = args.dynapipe_context_teams
    if most > 1 and args.attention_dropout:
        raise ConfigError(
            f"--dynapipe-context-teams {most} cannot be honoured: members of a team would drop other weights of"
            " attention than one replica",
            hint="pass --attention-dropout 0",
        )
    return most


def undivided_because(args: argparse.Namespace) -> str:
    """Why a run has whole backward passes alone; empty where it need not."""
    return first_reason(
        (
            (
                args.transformer_impl != "local" and HAVE_TRANSFORMER_ENGINE and not is_te_min_version("2.3.0"),
                "Transformer Engine below 2.3 computes all gradients together",
            ),
            (eight_bits.keeps_whole(args), eight_bits.WHOLE),
            ("mlp" in (args.recompute_modules or ()), "--recompute-modules mlp computes linear layers again"),
            (args.dynapipe_schedule != ADAPTIVE, f"--dynapipe-schedule {args.dynapipe_schedule} divides none"),
        )
    )


def split_backward(args: argparse.Namespace) -> Backward:
    """Whether plans may divide backward passes, as flags ask for it and the model's layers can.

    Raises:
        ConfigError: they are to, and the model's layers cannot.
    """
    asked: SplitBackward = args.dynapipe_split_backward
    reason = "" if asked == "off" else undivided_because(args)
    if asked == "on" and reason:
        flag = "--dynapipe-split-backward"
        raise ConfigError(f"{flag} on cannot be honoured: {reason}", hint=f"pass {flag} auto or off")
    return "off" if reason else asked, reason


def schedule(args: argparse.Namespace) -> ScheduleSettings:
    """How plans order passes.

    Raises:
        ConfigError: the schedule cannot order the passes of this run's pipeline.
    """
    flag = "--dynapipe-schedule"
    method = args.dynapipe_schedule
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if reason := unordered_because(method, stages=stages, chunks=chunks):
        raise ConfigError(
            f"{flag} {method} cannot order the passes of {stages} pipeline stages of {chunks} virtual stages each:"
            f" {reason}",
            hint=f"pass {flag} {ADAPTIVE}, or another number of stages",
        )
    return ScheduleSettings(method=method)


def _cannot_pack(args: argparse.Namespace, *, on_cpu: bool) -> Sequence[tuple[bool, str]]:
    """The parts of a model that cannot take packed rows."""
    engine = engine_attention(args)
    relative = args.position_embedding_type == "relative"
    return (
        (args.position_embedding_type == "mrope", "multimodal rotary positions are given for whole rows"),
        (bool(getattr(args, "fused_single_qkv_rope", False)), "--fused-single-qkv-rope takes no packed rows"),
        (
            not engine and not on_cpu and args.attention_dropout > 0,
            "PyTorch's attention over packed rows has no dropout, and --attention-dropout is "
            f"{args.attention_dropout:g}",
        ),
        (engine and relative, "Transformer Engine's attention over packed rows has no biases"),
    )


def _packs_slowly(args: argparse.Namespace, *, on_cpu: bool) -> Sequence[tuple[bool, str]]:
    """Models that packed rows can compute, but not in one kernel: each length for itself, or waiting for the device."""
    engine = engine_attention(args)
    head = args.kv_channels or args.hidden_size // args.num_attention_heads
    kernel = not on_cpu and not engine
    special = special_attention(args)
    biased = kernel and args.position_embedding_type == "relative"
    return (
        (engine and not _is_half(args), "Transformer Engine's attention over packed rows is for fp16 and bf16"),
        (
            engine and bool(special),
            f"Transformer Engine's attention with {special} over packed rows has not been run; {FLAG} packed takes it",
        ),
        (kernel and not _is_half(args), "PyTorch's attention over packed rows is for fp16 and bf16"),
        (
            kernel and torch.cuda.get_device_capability() < LEAST_CAPABILITY,
            "PyTorch's attention over packed rows needs compute capability 8.0",
        ),
        (
            kernel and (head > MAX_HEAD_SIZE or head % HEAD_SIZE_MULTIPLE > 0),
            f"PyTorch's attention over packed rows has no heads of {head} channels",
        ),
        (
            biased and bool(missing_for_kernels()),
            f"PyTorch compiles attention over packed rows with relative positions, found no {missing_for_kernels()}",
        ),
        (
            biased and head < LEAST_HEAD_SIZE,
            f"PyTorch's attention over packed rows with relative positions wants heads of {LEAST_HEAD_SIZE} channels",
        ),
    )


def _is_half(args: argparse.Namespace) -> bool:
    return bool(args.bf16 or args.fp16)


def first_reason(reasons: Sequence[tuple[bool, str]]) -> str:
    """The first that holds; empty where none does."""
    return next((reason for holds, reason in reasons if holds), "")
