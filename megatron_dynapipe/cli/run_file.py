"""What a run file says of memory and time beside its model, to commands that plan: taken over, or named as not read."""

import argparse
import sys
from collections.abc import Mapping

from megatron_dynapipe import config
from megatron_dynapipe.cli.batch_arguments import SAMPLES
from megatron_dynapipe.cli.model_config import run_words

_SHARED = "--use-distributed-optimizer"
_SEQUENCE = "--sequence-parallel"
_PLANNED: Mapping[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "num_virtual_stages_per_pipeline_rank": "virtual_stages",
    "dynapipe_device_memory_limit": "device_memory_limit",
    "dynapipe_limit_rc_type": "limit_rc_type",
    "dynapipe_layers_per_stage": "layers_per_stage",
    "dynapipe_cluster": "cluster",
    "dynapipe_loss": "loss",
    **{
        f"dynapipe_{name}": name
        for name in ("layout", "slices", "split_backward", "schedule", "scatter_gather", "expert_imbalance")
    },
    **dict.fromkeys(("sequence_parallel", "recompute_granularity"), ""),
}
"""Flags of a run by destination, and what arguments of commands say in their place; "" where none does."""
_OF_BATCHES = {name: name for name in ("global_batch_size", "tokens_per_global_batch")}
"""Those of how samples are drawn from a dataset."""


def take_run_file(args: argparse.Namespace) -> None:
    """Share the optimizer as the run file of `--model-config` does; say on stderr what of the file is not planned."""
    words = run_words(args)
    if _SHARED in words:
        args.distributed_optimizer = True
    flags = {**_PLANNED, **(_OF_BATCHES if args.data is not None else {})}
    valued = [f"{word}=true" if word == _SEQUENCE else word for word in words]
    found = vars(config.early_flags(valued, dict.fromkeys(flags, "")))
    unread = [
        f"{name.replace('_', '-')} {value} (planned: {planned})"
        for name, value in found.items()
        if value and value != (planned := _planned(args, flags[name]))
    ]
    if unread:
        print(f"not read from {args.model_config}: {', '.join(unread)}", file=sys.stderr)


def _planned(args: argparse.Namespace, name: str) -> str:
    """What is planned with, as a run file would say it."""
    value = getattr(args, name) if name else None
    if name == "global_batch_size":
        value = value or SAMPLES
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "as the command's other arguments say" if value is None else str(value)
