"""Kernels that PyTorch has fused, if Megatron would take Transformer Engine's or apex's and finds neither.

    PyTorch's Adam    one kernel for all parameters of a kind (`fused=True`), where Megatron asks for none
    weight gradient   of linear layers, added to the gradient buffer by the product itself
                      (`gradient_accumulation_fusion`, Megatron's default), where Megatron raises
    cross entropy     compiled, or some rows at a time (`megatron/hooks/cross_entropy.py`); Megatron's is unfused

With Transformer Engine its own layers add weight gradients up so; the head is Megatron's linear layer all the same, and
without apex it would raise.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from torch import Tensor

from megatron_dynapipe.megatron.hooks.cross_entropy import cross_entropy
from megatron_dynapipe.megatron.hooks.originals import Originals, holders
from megatron_dynapipe.outputs import say

LINEAR = "megatron.core.tensor_parallel.layers"
EXTENSION = "fused_weight_gradient_mlp_cuda"
AVAILABLE = "_grad_accum_fusion_available"
PARALLEL = "megatron.core.tensor_parallel"
ENTROPY = "vocab_parallel_cross_entropy"
OPTIMIZER = "megatron.core.optimizer"
FACTORY = "get_megatron_optimizer"

PACKAGES = {"transformer_engine": "Transformer Engine", "apex": "apex"}
"""Whose fused Adam Megatron takes, the first of them; without either it is PyTorch's."""


class WeightGradients:
    """The two functions of apex's extension of that name that Megatron calls, of tensors' own operations."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, buffer: Tensor) -> None:
        """Add gradientᵀ × inputs to an fp32 buffer; inputs [n, i], gradient [n, o], buffer [o, i]."""
        if inputs.dtype == buffer.dtype:
            buffer.addmm_(gradient.t(), inputs)
        elif _product_adds_up(buffer.device, inputs.dtype):
            torch.addmm(buffer, gradient.t(), inputs, out_dtype=buffer.dtype, out=buffer)
        else:
            buffer.add_(gradient.t().matmul(inputs))

    @staticmethod
    def wgrad_gemm_accum_fp16(inputs: Tensor, gradient: Tensor, buffer: Tensor) -> None:
        """The same to a buffer of the inputs' type, fp16 or bf16."""
        buffer.addmm_(gradient.t(), inputs)


@functools.cache
def _product_adds_up(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of half-precision numbers can be added to an fp32 buffer in one kernel: not on a CPU."""
    if device.type == "cpu":
        return False
    half = torch.zeros(16, 16, dtype=dtype, device=device)
    buffer = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(buffer, half, half, out_dtype=buffer.dtype, out=buffer)
    except (RuntimeError, TypeError) as error:
        say(f"weight gradients are not added up by their products, which PyTorch refuses here: {error}")
        return False
    return True


def fuse_adam(optimizer: object) -> None:
    """Let PyTorch's Adam inside one of Megatron's optimizers, or several, run as one kernel; leave others alone."""
    for part in getattr(optimizer, "chained_optimizers", (optimizer,)):
        inner = getattr(part, "optimizer", None)
        if not isinstance(inner, torch.optim.Adam) or inner.defaults["differentiable"]:
            continue
        for group in (inner.defaults, *inner.param_groups):
            group["fused"], group["foreach"] = True, False
        for parameter, state in inner.state.items():
            if "step" in state:
                state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def optimizer_in_words(name: str) -> str:
    """Which optimizer Megatron makes of its `--optimizer`: of Adam the fused one of the first package that is there."""
    if name != "adam":
        return name
    adam = importlib.import_module(OPTIMIZER).Adam  # as its module chose when it was imported
    package = PACKAGES.get(adam.__module__.partition(".")[0], "PyTorch")
    return f"Adam of {package}, fused"


def install(originals: Originals) -> None:
    """Fuse the Adam of optimizers that Megatron makes from now on, and provide weight gradients if nobody does."""
    module = importlib.import_module(OPTIMIZER)
    original = getattr(module, FACTORY)

    @functools.wraps(original)
    def fused(*arguments: object, **keywords: object) -> Any:
        optimizer = original(*arguments, **keywords)
        fuse_adam(optimizer)
        return optimizer

    for owner in holders(FACTORY, original):
        originals.replace(owner, FACTORY, fused)
    parallel: object = importlib.import_module(PARALLEL)
    originals.replace(parallel, ENTROPY, _in_two_passes(getattr(parallel, ENTROPY)))
    layers = importlib.import_module(LINEAR)
    if not getattr(layers, AVAILABLE):
        originals.replace(layers, EXTENSION, WeightGradients)
        originals.replace(layers, AVAILABLE, True)


def _in_two_passes(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def replaced(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None) -> Tensor:
        if label_smoothing:
            return original(logits, target, label_smoothing, tp_group)
        return cross_entropy(logits, target, tp_group or get_tensor_model_parallel_group())

    return replaced
