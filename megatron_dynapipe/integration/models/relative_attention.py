"""Attention over packed rows with relative biases: `flex_attention`, compiled, in place of a call for each length.

row of a sample of 3 and one of 2         biases by distance, key minus query
    b0 b1 b2                                  -2 -1  0  1  2
    b-1 b0 b1                             one vector for all samples of a row, and for all of its layers
    b-2 b-1 b0
             b0 b1                        what lies outside of samples is masked, by blocks of 128 × 128, of which
             b-1 b0                       those without any sample's pair are not computed
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megatron_dynapipe.integration.models.packed_attention import has_kernel
from megatron_dynapipe.integration.models.packed_rows import PackedRow
from megatron_dynapipe.runtime.kernel_compiler import missing_for_kernels

BLOCK = 128
"""Positions of a block's sides."""
LEAST_HEAD_SIZE = 16
"""Channels of a head, of which flex_attention's kernels take no fewer."""


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
        scale: of the scores.

    Returns:
        [t, heads, channels].
    """
    segments = _segments(row, query.device, causal=causal)
    # In fp32, in which the kernel's backward adds the gradients of a distance's many pairs up.
    biases = by_distance(bias.float())
    positions = segments.positions
    distances = bias.size(-1) - 1 - positions  # a tensor, so that no number is compiled into the kernel

    def biased(score: Tensor, _batch: Tensor, head: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        return score + biases[head, positions[of_key] + distances[of_query]]

    attended: Tensor = _attend(query.device)(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=biased,
        block_mask=segments.mask,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return attended[0].transpose(0, 1)


def by_distance(bias: Tensor) -> Tensor:
    """[heads, 2 n - 1] biases of distances -(n - 1) … n - 1, from the first column and row of [1, heads, n, n]."""
    return torch.cat([bias[0, :, 1:, 0].flip(-1), bias[0, :, 0]], dim=-1)


@functools.cache
def _attend(device: torch.device) -> Callable[..., Any]:
    """Compiled for sizes that change; on a CPU as it is, since there only that has gradients."""
    return torch.compile(flex.flex_attention, dynamic=True) if device.type == "cuda" else flex.flex_attention


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """Each position's place in its segment, int64[t], and the mask of segments."""

    positions: Tensor
    mask: flex.BlockMask


def _segments(row: PackedRow, device: torch.device, *, causal: bool) -> _Segments:
    """Made once for all layers."""
    made = row.kept.get("flex")
    if made is None:
        made = row.kept["flex"] = _make_segments(row, device, causal=causal)
    assert isinstance(made, _Segments)
    return made


def _make_segments(row: PackedRow, device: torch.device, *, causal: bool) -> _Segments:
    assert row.positions is not None and not row.cuts, "a row of whole samples"
    positions, length = row.positions[0], sum(row.lengths_q)
    segment = torch.bucketize(torch.arange(length, device=device), row.cu_seqlens_q[1:], right=True)

    def same_sample(_batch: Tensor, _head: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        same = segment[of_query] == segment[of_key]
        return same & (of_key <= of_query) if causal else same

    counts, indices = (
        torch.from_numpy(each)[None, None].to(device, non_blocking=True) for each in _blocks(row, causal=causal)
    )
    mask = flex.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=BLOCK, mask_mod=same_sample, seq_lengths=(length, length)
    )
    return _Segments(positions, mask)


def _blocks(row: PackedRow, *, causal: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of every block of queries the blocks of keys with pairs of one segment: their number, and which, int32.

    They are consecutive, as segments are.
    """
    ends = np.cumsum(row.lengths_q)
    length = int(ends[-1])
    blocks = -(-length // BLOCK)
    first = np.arange(blocks) * BLOCK
    last = np.minimum(first + BLOCK, length) - 1
    starts = ends - np.array(row.lengths_q)
    first_key = starts[np.searchsorted(ends, first, side="right")]
    last_key = last if causal else ends[np.searchsorted(ends, last, side="right")] - 1
    begins, counts = first_key // BLOCK, last_key // BLOCK - first_key // BLOCK + 1
    indices = (begins[:, None] + np.arange(blocks)[None]) % blocks  # those that count, then the others
    return counts.astype(np.int32), indices.astype(np.int32)
