"""The gathers of parameters that Megatron's hooks leave to forward passes, where a replica has none.

With `--overlap-param-gather` a rank joins the all-gather of a bucket of parameters when the first module that uses it
runs. A replica without micro-batches would never join, and the others would wait for it.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_dynapipe.plan.instructions import Forward, Instruction


def gather_parameters(models: Sequence[nn.Module], instructions: Sequence[Instruction]) -> None:
    """Join the gathers of the chunks that run no forward pass in this list, in the order of the other replicas.

    Args:
        models: this rank's model chunks, wrapped in Megatron's `DistributedDataParallel`.
        instructions: of this rank.
    """
    run = {instruction.chunk for instruction in instructions if isinstance(instruction, Forward)}
    for chunk, model in enumerate(models):
        if chunk not in run and _gathers_in_forward_passes(model):
            groups: list[Any] = getattr(model, "bucket_groups")  # noqa: B009  (not an attribute nn.Module knows)
            for group in reversed(
                groups
            ):  # buckets are filled from the model's end; a forward pass begins at its start
                group.finish_param_sync()


def _gathers_in_forward_passes(model: nn.Module) -> bool:
    """Whether hooks are on: they are off in a run's first iteration and while it evaluates."""
    return bool(getattr(model, "use_forward_hook", False) and getattr(model, "remove_forward_pre_hook_handles", None))
