"""Attention over packed rows with relative biases: `flex_attention`, compiled, in place of a call for each length.

row of a sample of 3 and one of 2         biases by distance, key minus query
    b0 b1 b2                                  -2 -1  0  1  2
    b-1 b0 b1                             one vector for all samples of a row, and for all of its layers
    b-2 b-1 b0
             b0 b1                        what lies outside of samples is masked, by blocks of 128 × 128;
             b-1 b0                       blocks without any sample's pair are not computed, nor the mask in blocks that
                                          lie within one sample
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from megatron_dynapipe.megatron.models.packed_attention import has_kernel
from megatron_dynapipe.megatron.models.packed_rows import PackedRow
from megatron_dynapipe.runtime.kernel_compiler import missing_for_kernels

BLOCK = 128
"""Positions of a block's sides."""
LEAST = BLOCK + 1
"""Positions that a row is padded to, so that all rows are of one compiled kernel: one of fewer positions than a block
is another, and a single block would be compiled in.
"""
LEAST_HEAD_SIZE = 16
"""The fewest channels of a head that flex_attention's kernels take."""


def biases_take_kernel(device: torch.device, head_size: int, *, dropout: bool) -> bool:
    """Whether attention with biases runs in one kernel: a compiled one, without dropout."""
    return not dropout and head_size >= LEAST_HEAD_SIZE and has_kernel(device) and not missing_for_kernels()


def attend_with_biases(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, bias: Tensor, *, causal: bool, scale: float
) -> Tensor:
    """Self-attention of each segment by itself.

    Args:
        query: [t, heads, channels].
        key: [t, groups, channels].
        value: likewise.
        row: where the segments lie; none of them a piece.
        bias: [1, heads, n, n] of at least the longest segment; of distances alone, as relative positions are.
        causal: whether later keys are hidden.
        scale: multiplies the scores.

    Returns:
        [t, heads, channels].
    """
    length = query.size(0)
    missing = max(LEAST - length, 0)
    query, key, value = (functional.pad(t, (0, 0, 0, 0, 0, missing)) if missing else t for t in (query, key, value))
    # In fp32, in which the kernel's backward adds the gradients of a distance's many pairs up.
    biases = by_distance(bias.float())
    mask = _mask(row, query.device, causal=causal)
    # A tensor, so that no number is compiled into the kernel.
    farthest = torch.full((), bias.size(-1) - 1, device=query.device)

    def biased(score: Tensor, _batch: Tensor, head: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        # Of two samples' positions the distance may be any; they are masked.
        distance = (of_key - of_query).clamp(-farthest, farthest)
        return score + biases[head, distance + farthest]

    attended: Tensor = _attend(query.device)(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=biased,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return attended[0].transpose(0, 1)[:length]


def by_distance(bias: Tensor) -> Tensor:
    """[heads, 2 n - 1] biases of distances -(n - 1) … n - 1, from the first column and row of [1, heads, n, n]."""
    return torch.cat([bias[0, :, 1:, 0].flip(-1), bias[0, :, 0]], dim=-1)


@functools.cache
def _attend(device: torch.device) -> Callable[..., Any]:
    """Compiled for sizes that change; on a CPU as it is, since there only that has gradients."""
    attend: Callable[..., Any] = flex.flex_attention
    return torch.compile(attend, dynamic=True) if device.type == "cuda" else attend


def _mask(row: PackedRow, device: torch.device, *, causal: bool) -> flex.BlockMask:
    """Made once for all layers."""
    mask = row.kept.get("flex")
    if mask is None:
        mask = row.kept["flex"] = _make_mask(row, device, causal=causal)
    assert isinstance(mask, flex.BlockMask)
    return mask


def _make_mask(row: PackedRow, device: torch.device, *, causal: bool) -> flex.BlockMask:
    assert not row.cuts, "a row of whole samples"
    length = max(sum(row.lengths_q), LEAST)
    segment = torch.bucketize(torch.arange(length, device=device), row.cu_seqlens_q[1:], right=True)

    def same_sample(_batch: Tensor, _head: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        same = segment[of_query] == segment[of_key]
        return same & (of_key <= of_query) if causal else same

    # Tensors of their own: of views, Dynamo takes a size for a place in their buffer where the two are equal by chance.
    counts, indices = (
        [kind.clone() for kind in torch.from_numpy(part).to(device, non_blocking=True)]
        for part in _blocks(row, causal=causal)
    )
    # Sizes of their own, too: where a row has as many blocks as the model has heads, say, Dynamo takes the two for one
    # number, which it compiles in; any other number of blocks is then compiled anew, and after eight not at all.
    for tensor in (*counts, *indices):
        for dimension in range(2, tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    return flex.BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=counts[0],
        kv_indices=indices[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=indices[1],
        q_num_blocks=counts[2],
        q_indices=indices[2],
        full_q_num_blocks=counts[3],
        full_q_indices=indices[3],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=same_sample,
    )


def _blocks(row: PackedRow, *, causal: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Number and indices of the blocks of keys that a block of queries has pairs of one sample with.

    Returns:
        Counts int32[4, 1, 1, blocks] and indices int32[4, 1, 1, blocks, blocks], those that count first: blocks of keys
        for each of queries, with a mask and without one, then blocks of queries for each of keys, likewise.
    """
    ends = np.cumsum(row.lengths_q)
    if ends[-1] < LEAST:  # padding is a segment of its own
        ends = np.append(ends, LEAST)
    length = int(ends[-1])
    first = np.arange(0, length, BLOCK)
    last = np.minimum(first + BLOCK, length) - 1
    begins, finishes = (np.searchsorted(ends, edge, side="right") for edge in (first, last))
    shared = (begins[:, None] <= finishes) & (begins <= finishes[:, None])
    whole = (first + BLOCK <= length) & (begins == finishes)
    within = shared & whole[:, None] & whole
    if causal:
        later = np.arange(len(first)) - np.arange(len(first))[:, None]
        shared = shared & (later <= 0)
        within = within & (later < 0)
    kinds = np.stack([shared & ~within, within, (shared & ~within).T, within.T])[:, None, None]
    indices = np.argsort(~kinds, axis=-1, kind="stable")
    return kinds.sum(axis=-1, dtype=np.int32), indices.astype(np.int32)
