"""Fused kernels that Megatron takes by default, on a machine that lacks what they come from."""

import argparse
import os
import sys

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.runtime.kernel_compiler import HINT, missing_for_kernels


def settle(args: argparse.Namespace, *, on_cpu: bool) -> None:
    """Switch the fused rotary kernel off where Transformer Engine is missing, and say so on rank 0.

    Megatron's flags can switch it off, not on: it is on by default, and its configuration raises then.

    Raises:
        ConfigError: layers have parts that are compiled, and the machine has no compiler for them.
    """
    from megatron.core.models.common.embeddings import rope_utils

    is_rope = args.position_embedding_type == "rope"
    if args.apply_rope_fusion and is_rope and rope_utils.fused_apply_rotary_pos_emb is None:
        args.apply_rope_fusion = False
        if os.environ.get("RANK", "0") == "0":
            print("rotary positions: unfused, as Transformer Engine is not installed", file=sys.stderr, flush=True)
    if not on_cpu and (flags := _compiled(args)) and (missing := missing_for_kernels()):
        raise ConfigError(
            f"expected what PyTorch compiles fused layers with, found no {missing}",
            hint=f"{HINT}, or pass {' '.join(flags)}",
        )


def _compiled(args: argparse.Namespace) -> list[str]:
    """The flags that switch off what Megatron compiles of its layers, of those that are on."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return []
    activation = "swiglu" if args.swiglu else "gelu"
    parts = (f"bias_{activation}_fusion", "bias_dropout_fusion")
    return [f"--no-{part.replace('_', '-')}" for part in parts if getattr(args, part)]
