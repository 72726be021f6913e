"""Which linear layers compute the gradients of their weights apart (`models.divided_linears`), and which cannot."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_dynapipe.megatron.models.divided_linears import DividedModule, EngineStore
from megatron_dynapipe.megatron.models.eight_bits import WHOLE, keeps_whole

_MATRIX = 2
"""Dimensions of a linear's weight."""


def undivided_because(chunks: Sequence[Any]) -> str:
    """Why the backward passes of equipped chunks stay whole; empty where they may be divided."""
    if "mlp" in (chunks[0].config.recompute_modules or ()):
        return "recompute_modules mlp computes linear layers again"
    if keeps_whole(chunks[0].config):
        return WHOLE
    whole = sorted({type(linear).__name__ for linear in _whole_linears(chunks)})
    return f"{', '.join(whole)} computes all gradients together" if whole else ""


def _whole_linears(chunks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules of layers with a trained matrix, whose backward passes leave no products."""
    layers = [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, TransformerLayer)]
    for module in (module for layer in layers for module in layer.modules()):
        divided = isinstance(getattr(module, "wgrad_store", None), EngineStore)
        if divided or isinstance(module, ColumnParallelLinear | RowParallelLinear | DividedModule | TopKRouter):
            continue
        trained = (weight for weight in module.parameters(recurse=False) if weight.requires_grad)
        if any(weight.dim() == _MATRIX for weight in trained):
            yield module
