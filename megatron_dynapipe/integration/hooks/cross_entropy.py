"""Cross entropy over a sharded vocabulary, some rows at a time, with the gradient made in the forward pass.

    logits [s, b, v] ── per chunk of rows, in fp32: exp(x - max), sum, log ──► loss [s, b]
                                                    └── softmax - one-hot ──► gradient [s, b, v], in the logits' type

Megatron's own makes an fp32 copy of all logits and goes through it seven times; its softmax in fp32 waits for the
backward pass. Here only a chunk is ever in fp32: on a CPU it stays in the caches, and with bf16 what waits is half as
large. Over several tensor-parallel ranks maxima and sums are reduced first, so that logits are read twice more.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.utils import VocabUtility
from torch import Tensor

CPU_ELEMENTS = 2**18
CUDA_ELEMENTS = 2**26
"""Logits of a chunk: 1 MB in fp32, which fits a core's cache; on a GPU 268 MB, so that launches are few."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        rows = logits.reshape(-1, logits.size(-1))
        size = logits.size(-1)
        first, end = VocabUtility.vocab_range_from_per_partition_vocab_size(size, group.rank(), group.size())
        flat = labels.reshape(-1)
        here = (flat >= first) & (flat < end)
        columns = torch.where(here, flat - first, 0)[:, None]
        chunks = _chunks(rows)
        known = _reduced(rows, columns, here, chunks, group) if group.size() > 1 else None
        gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        for chunk in chunks:
            if known is None:
                maximum = None
                total = None
                predicted = None
            else:
                maximum, total, predicted = (reduced[chunk] for reduced in known)
                losses[chunk] = total.log() - predicted
                if gradient is None:
                    continue
            part = _shifted(rows[chunk], maximum)
            if predicted is None:
                predicted = part.gather(1, columns[chunk]).squeeze(1)
            part.exp_()
            if total is None:
                total = part.sum(dim=1)
                losses[chunk] = total.log() - predicted
            if gradient is not None:
                part.div_(total[:, None])
                part.scatter_add_(1, columns[chunk], -here[chunk, None].to(part.dtype))
                gradient[chunk] = part
        if gradient is not None:
            ctx.save_for_backward(gradient.view_as(logits))
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        scale = outer[0].reshape(-1, 1)
        rows = gradient.view(-1, gradient.size(-1))
        if rows.dtype == torch.float32 or rows.is_cuda:
            rows.mul_(scale)
        else:  # a CPU multiplies half precision by fp32 in place a number at a time
            for chunk in _chunks(rows):
                rows[chunk] = rows[chunk].float().mul_(scale[chunk])
        return gradient, None, None


def chunked_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Losses in fp32 [s, b] of logits [s, b, vocabulary / ranks] and labels [s, b] of the whole vocabulary.

    The backward pass may run once: it scales the gradient where it lies.
    """
    losses: Tensor = _ChunkedCrossEntropy.apply(logits, labels, group)
    return losses


def _chunks(rows: Tensor) -> list[slice]:
    elements = CUDA_ELEMENTS if rows.is_cuda else CPU_ELEMENTS
    step = max(elements // max(rows.size(1), 1), 1)
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def _shifted(rows: Tensor, maximum: Tensor | None) -> Tensor:
    """A copy of some rows in fp32, less their maxima."""
    if rows.dtype != torch.float32:
        wide = rows.float()
        return wide.sub_((wide.amax(dim=1) if maximum is None else maximum)[:, None])
    return torch.sub(rows, (rows.amax(dim=1) if maximum is None else maximum)[:, None])


def _reduced(
    rows: Tensor, columns: Tensor, here: Tensor, chunks: list[slice], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's maximum, sum of exponentials and label's logit, less the maximum, over all ranks."""
    maximum = rows.amax(dim=1).float()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    sums = torch.empty(2, len(rows), dtype=torch.float32, device=rows.device)
    for chunk in chunks:
        part = _shifted(rows[chunk], maximum[chunk])
        sums[1, chunk] = torch.where(here[chunk], part.gather(1, columns[chunk]).squeeze(1), 0)
        sums[0, chunk] = part.exp_().sum(dim=1)
    dist.all_reduce(sums, group=group)
    return maximum, sums[0], sums[1]
