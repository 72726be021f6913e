"""Recomputation under the recipe of the forward pass, and what Megatron imports for graphs, which are not rehearsed."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as computed_again

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast
from transformer_engine.pytorch.fp8 import fp8_autocast as activation_recompute_forward

__all__ = ["CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"]


class CudaRNGStatesTracker:
    """A base class of Megatron's tracker for graphs."""


def checkpoint(
    function: Callable[..., Any],
    *arguments: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **options: Any,
) -> Any:
    """A function whose inside is computed again in the backward pass, which is outside of the context of a recipe."""
    assert not distribute_saved_activations
    recipe = FP8GlobalStateManager.recipe

    def run(*given: Any) -> Any:
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return function(*given, **options)

    return computed_again(run, *arguments, use_reentrant=True)
