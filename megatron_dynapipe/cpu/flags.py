"""Megatron's settings for a run on the CPU."""

import argparse
from typing import Any

ARGS_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",  # NCCL has no CPU transport
    "use_cpu_initialization": True,  # weights drawn by the CPU's generator, the same for every tensor-parallel size
    "transformer_impl": "local",  # Transformer Engine is CUDA only
    "no_persist_layer_norm": True,  # apex's persistent kernel
    "gradient_accumulation_fusion": False,  # apex's fused weight gradient
    "masked_softmax_fusion": False,  # compiled CUDA kernel
    "bias_gelu_fusion": False,  # written for torch.compile, which is off
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,  # Transformer Engine's kernel
}
"""Defaults of Megatron's arguments (by destination) for a run on the CPU.

For `parser.set_defaults`, which the command line overrides. The `args_defaults` of Megatron's `parse_and_validate_args`
fill only arguments that are None, so they would change none of these.
"""


def set_args_defaults(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `ARGS_DEFAULTS` the parser's defaults; to be called from an `extra_args_provider`."""
    parser.set_defaults(**ARGS_DEFAULTS)
    return parser
