"""The modules."""

from transformer_engine.pytorch import distributed, fp8, ops, optimizers, router, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.linears import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norms import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "optimizers",
    "router",
    "tensor",
]
