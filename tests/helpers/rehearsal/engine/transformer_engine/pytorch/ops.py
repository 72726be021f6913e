"""Fused sequences of operations, of which there are none: Megatron-Bridge names the class in annotations."""

from torch.nn import Sequential

__all__ = ["Sequential"]
