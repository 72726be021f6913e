"""What Megatron imports for graphs and for fp8, neither of which is rehearsed."""

from transformer_engine.pytorch.fp8 import fp8_autocast as activation_recompute_forward

__all__ = ["CudaRNGStatesTracker", "activation_recompute_forward"]


class CudaRNGStatesTracker:
    """A base class of Megatron's tracker for graphs."""
