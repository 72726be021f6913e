"""Cross entropy over a sharded vocabulary, in one pass over the logits forward and one backward.

    logits [s, b, v] ──► forward     maximum, sum of exp(x - maximum), label's logit of each row, in fp32
                     └─► backward    softmax · outer, less outer at the label: gradient [s, b, v], in the logits' type

On a GPU `torch.compile` makes a kernel of each pass, which moves 2 and 4 bytes of a bf16 logit. If it cannot, and on
a CPU, some rows are taken at a time, so that what they are in fp32 stays in a cache. Megatron's own makes an fp32 copy
of all logits, goes through it seven times, and keeps a softmax in fp32.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.utils import VocabUtility
from torch import Tensor
from torch._dynamo import config as dynamo

from megatron_dynapipe.runtime.kernel_compiler import missing_for_kernels

ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
"""Logits that are taken at a time, which the cache holds in fp32."""
COMPILED_ELEMENTS = 2**30
"""Logits of one kernel, at most: their numbers fit 32 bits."""

_LEAST = torch.finfo(torch.float32).min


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        size = logits.size(-1)
        rows = logits.reshape(-1, size)
        first, end = VocabUtility.vocab_range_from_per_partition_vocab_size(size, group.rank(), group.size())
        flat = labels.reshape(-1)
        here = (flat >= first) & (flat < end)
        columns = torch.where(here, flat - first, 0)[:, None]
        sums, _, step = _passes(rows)
        parts = [sums(*part) for part in zip(rows.split(step), columns.split(step), strict=True)]
        maximum, total, predicted = map(torch.cat, zip(*parts, strict=True))
        if group.size() > 1:
            maximum, total, predicted = _over_ranks(maximum, total, predicted, here, group)
        ctx.save_for_backward(rows, maximum, total, columns, here)
        return (total.log() - predicted).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        rows, maximum, total, columns, here = ctx.saved_tensors
        of_loss = outer[0].reshape(-1)
        scale = of_loss / total
        gradient = torch.empty_like(rows)
        _, exponentials, step = _passes(rows)
        parts = (each.split(step) for each in (gradient, rows, maximum, scale))
        for part in zip(*parts, strict=True):
            exponentials(*part)
        at_label = rows.gather(1, columns).squeeze(1) - maximum
        of_label = at_label.exp() * scale - of_loss * here
        gradient.scatter_(1, columns, of_label[:, None].to(gradient.dtype))
        return gradient.view(*outer[0].shape, -1), None, None


def _over_ranks(
    maximum: Tensor, total: Tensor, predicted: Tensor, here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """What `row_sums` says of all ranks' logits, from this rank's; `here`: which rows' labels are among these."""
    of_all = maximum.clone()
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
    less = maximum - of_all
    both = torch.stack([
        total * less.exp(),
        torch.where(here, predicted + less, 0),
    ])  # fmt: skip
    dist.all_reduce(both, group=group)
    return of_all, both[0], both[1]


def cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Losses in fp32 [s, b] of logits [s, b, vocabulary / ranks] and labels [s, b] of the whole vocabulary."""
    losses: Tensor = _CrossEntropy.apply(logits, labels, group)
    return losses


def row_sums(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's maximum, and, less that, the sum of exponentials and the logit at its column; all in fp32 [rows]."""
    wide = rows.float()
    maximum = wide.amax(dim=1).clamp_min(_LEAST)  # a rank's logits may all be minus infinity
    shifted = wide - maximum[:, None]
    at_column = shifted.gather(1, columns).squeeze(1)
    total = shifted.exp_().sum(dim=1)
    return maximum, total, at_column


def put_exponentials(out: Tensor, rows: Tensor, maximum: Tensor, scale: Tensor) -> None:
    """Put the exponentials of rows less their maxima, times a number for each row, into `out`."""
    shifted = rows.float() - maximum[:, None]
    out.copy_(shifted.exp_().mul_(scale[:, None]))


def _passes(rows: Tensor) -> tuple[Callable[..., Any], Callable[..., Any], int]:
    """What goes through rows forward and backward, and how many of them at a time."""
    if rows.is_cuda and not dynamo.disable and not missing_for_kernels():
        sums, exponentials = _compiled()
        elements = COMPILED_ELEMENTS
    else:
        sums, exponentials = row_sums, put_exponentials
        elements = ELEMENTS[rows.device.type]
    step = max(elements // max(rows.size(1), 1), 1)
    return sums, exponentials, step


@functools.cache
def _compiled() -> tuple[Callable[..., object], ...]:
    """For any number of rows: plans change it in every pass."""
    functions = row_sums, put_exponentials
    return tuple(torch.compile(function, dynamic=True) for function in functions)
