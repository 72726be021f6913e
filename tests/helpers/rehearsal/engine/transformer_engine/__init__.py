"""Transformer Engine as Megatron's `core/extensions/transformer_engine.py` uses it, computing with PyTorch.

Names, arguments, attributes, dtypes and what is refused are those of version 2.20 (d0067d0d). Recipes of fp8 are those
without history.
Processes find it by `launch.environment(…, engine=True)`.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.0"
__all__ = ["common", "pytorch"]
