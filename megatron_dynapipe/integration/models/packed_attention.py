"""Attention over packed rows: every sample for itself.

    row of queries   a a a b b c c c c        on CUDA, one kernel over all segments: `varlen_attn` (FlashAttention)
    row of keys      A A B B B B C            elsewhere, SDPA per sample, samples of equal lengths batched together

Neither pads, and neither computes what is masked away. A segment may have queries without keys (the tail of a T5's
decoder row where its encoder row has none): they attend to nothing and come out as zeros.
"""

from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.integration.models.packed_rows import PackedRow

KERNEL_TYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 256, 8
"""Head sizes that FlashAttention has."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query [n, queries, heads, channels], key and value [n, keys, groups, channels], bias) → like the query."""


def kernel_takes(dtype: torch.dtype, head_size: int, *, on_cuda: bool, dropout: bool, biased: bool) -> bool:
    """Whether `varlen_attn` can compute an attention: it has neither dropout nor biases."""
    fits = head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0
    return on_cuda and dtype in KERNEL_TYPES and fits and not dropout and not biased


def attend_in_kernel(
    query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, *, causal: bool, scale: float
) -> Tensor:
    """One kernel over all segments; arguments and result as of `attend_by_sample`."""
    attended = varlen_attn(
        query,
        key,
        value,
        row.cu_seqlens_q,
        row.cu_seqlens_kv,
        row.max_seqlen_q,
        row.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    assert isinstance(attended, Tensor), "asked for nothing but the result"
    return attended


def attend_by_sample(
    query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, attend: Attend, bias: Tensor | None = None
) -> Tensor:
    """Attention of each segment by itself, those of equal lengths together.

    Args:
        query: [t, heads, channels].
        key: [s, groups, channels].
        value: likewise.
        row: where the segments lie.
        attend: computes segments of one length.
        bias: [1, heads, queries, keys] of the longest segment, of which shorter ones have a corner.

    Returns:
        [t, heads, channels].

    Raises:
        PlanError: the segments do not cover the queries or the keys.
    """
    queries, keys = segment_lengths(row)
    if sum(queries) != query.size(0) or sum(keys) != key.size(0):
        raise PlanError(
            f"expected segments of {query.size(0)} queries and {key.size(0)} keys, got {sum(queries)} and {sum(keys)}"
        )
    alike: dict[tuple[int, int], list[int]] = {}
    for segment, lengths in enumerate(zip(queries, keys, strict=True)):
        if lengths[0]:
            alike.setdefault(lengths, []).append(segment)
    parts = query.split(queries), key.split(keys), value.split(keys)
    attended: dict[int, Tensor] = {}
    for (length, others), segments in alike.items():
        if not others:
            attended |= {segment: torch.zeros_like(parts[0][segment]) for segment in segments}
            continue
        rows = [_stacked([part[segment] for segment in segments]) for part in parts]
        corner = None if bias is None else bias[:, :, :length, :others]
        attended |= zip(segments, attend(rows[0], rows[1], rows[2], corner).unbind(), strict=True)
    return torch.cat([attended[segment] for segment in sorted(attended)])


def segment_lengths(row: PackedSeqParams) -> tuple[list[int], list[int]]:
    """Queries and keys of every segment; from offsets on a device they are read, which waits for it."""
    if isinstance(row, PackedRow):
        return list(row.lengths_q), list(row.lengths_kv)
    return row.cu_seqlens_q.diff().tolist(), row.cu_seqlens_kv.diff().tolist()


def _stacked(parts: list[Tensor]) -> Tensor:
    """[n, …] of n equal parts; one alone is not copied."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
