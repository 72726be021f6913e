"""The functions that a patched Megatron-LM checkout calls: the only names that `patches/` rely on.

This module keeps its name and its functions, so that a checkout patched today works with later versions. Each function
does nothing, or answers as Megatron would, unless `--use-dynapipe` is given.
"""

from megatron_dynapipe.integration.entry.checkout import (
    add_arguments,
    check_arguments,
    dataset_provider,
    finish,
    schedule,
)
from megatron_dynapipe.integration.hooks.active_run import count_samples, log_line, micro_batch_shape

__all__ = [
    "add_arguments",
    "check_arguments",
    "count_samples",
    "dataset_provider",
    "finish",
    "log_line",
    "micro_batch_shape",
    "schedule",
]
