"""Attention over packed rows: every sample for itself.

    row of queries   a a a b b c c c c        on CUDA, one kernel over all segments: `varlen_attn` (FlashAttention)
    row of keys      A A B B B B C            elsewhere, SDPA over samples of like lengths, padded inside attention

Queries without keys attend to nothing and come out as zeros; `packed_rows.attention_row` makes no such segments.
"""

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.megatron.models.kept_keys import KeptKeys, KeptPiece, joined_again
from megatron_dynapipe.megatron.models.packed_rows import PackedRow
from megatron_dynapipe.megatron.models.segment_groups import SegmentGroup, group_segments

KERNEL_TYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 256, 8
"""Head sizes that FlashAttention has."""
LEAST_CAPABILITY, HOPPER = (8, 0), 9
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""What allows fewer groups of keys than heads of queries; before PyTorch 2.12 the kernel takes them unasked."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query [n, queries, heads, channels], key and value [n, keys, groups, channels], bias) → like the query."""


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether a device can run FlashAttention, which PyTorch has from compute capability 8.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@functools.cache
def activate_flash_3(device: torch.device) -> bool:
    """Let PyTorch run FlashAttention 3 where the device is a Hopper and its package is installed; whether it does.

    PyTorch's dispatcher then calls it for all of FlashAttention's calls, packed rows and causal attention, and raises
    for those that it does not take: on other devices, or with dropout.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    if importlib.util.find_spec("flash_attn_interface") is None:
        return False
    try:
        activate_flash_attention_impl("FA3")
    except ImportError as error:
        print(f"FlashAttention 3 is installed, but not for this PyTorch: {error}; version 2 runs", flush=True)
        return False
    return True


def kernel_takes(dtype: torch.dtype, head_size: int, *, on_cuda: bool, dropout: bool, biased: bool) -> bool:
    """Whether `varlen_attn` can compute an attention: it has neither dropout nor biases."""
    fits = head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0
    return on_cuda and dtype in KERNEL_TYPES and fits and not dropout and not biased


def attend_in_kernel(
    query: Tensor, key: Tensor, value: Tensor, row: PackedSeqParams, *, causal: bool, scale: float
) -> Tensor:
    """One kernel over all segments; with the arguments and the result of `attend_by_sample`."""
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
        **GROUPED,
    )
    assert isinstance(attended, Tensor), "asked for nothing but the result"
    return attended


def attend_by_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedSeqParams,
    attend: Attend,
    bias: Tensor | None,
    *,
    causal: bool,
    kept: KeptKeys | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of each segment by itself, segments of like lengths together.

    Args:
        query: [t, heads, channels].
        key: [s, groups, channels].
        value: likewise.
        row: where the segments lie.
        attend: computes segments of one length.
        bias: [1, heads, queries, keys] of the longest segment; shorter ones take a corner of it. In causal
            attention, later keys are masked in it.
        causal: whether `attend` hides later keys; each segment then has as many keys as queries.
        kept: keys of earlier pieces, where there are pieces in the row; it has no bias then.
        scale: of the scores, if `attend` has no dropout: pieces then attend on a CPU without it, part by part.

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
    groups, back = (
        row.segment_groups(query.device) if isinstance(row, PackedRow) else group_segments(queries, keys, query.device)
    )
    attended = []
    for group in groups:
        if group.apart is not None and key.size(0) == query.size(0):  # else earlier keys are among the row's
            assert isinstance(row, PackedRow) and kept is not None, "a piece of a planned row"
            places = slice(start := row.starts()[group.apart], start + group.queries)
            piece = query[places], key[places], value[places]
            if scale is not None and not query.is_cuda:
                before = kept.before(row.cuts[group.apart])
                attended.append(_OverParts.apply(scale, *piece, before))
            else:
                attended.append(_attend_piece(*piece, row, group.apart, kept, attend))
            continue
        if group.keys == 0:
            attended.append(query.new_zeros(group.count * group.queries, *query.shape[1:]))
            continue
        mask = _mask(group, bias, query, row, causal=causal)
        of_queries = _picked(query, group.query_places, group.count)
        of_keys, of_values = (_picked(tensor, group.key_places, group.count) for tensor in (key, value))
        attended.append(attend(of_queries, of_keys, of_values, mask).flatten(0, 1))
    return torch.cat(attended).index_select(0, back)


def _attend_piece(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, segment: int, kept: KeptKeys, attend: Attend
) -> Tensor:
    """Attention of one piece to all before it and itself: [queries, heads, channels]."""
    before = [piece.read() for piece in kept.before(row.cuts[segment])]
    keys = [*(keys for keys, _ in before), key]
    values = [*(values for _, values in before), value]
    joined_keys = torch.cat(keys)
    joined_values = torch.cat(values)
    with joined_again((joined_keys, keys), (joined_values, values)):
        return attend(query[None], joined_keys[None], joined_values[None], row.later_keys(segment, query))[0]


class _OverParts(torch.autograd.Function):
    """Attention of one piece to those before it and itself, part by part: `_attend_piece` without mask or copy.

    Each part has a kernel of its own (PyTorch's FlashAttention for CPUs), weighted by its sum of scores. Backwards a
    part's kernel is given the result and the sum over all parts: it computes the part's own share then. What is an
    earlier piece's is added to it at once, since gradients of all parts would take as much memory as the parts.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: float, query: Tensor, key: Tensor, value: Tensor, before: Sequence[KeptPiece]
    ) -> Tensor:
        times = query.size(1) // key.size(1)
        out, total = _FLASH(_by_head(query), _by_head(key, times), _by_head(value, times), 0.0, True, scale=scale)
        for piece in before:
            keys = _by_head(piece.key, times)
            values = _by_head(piece.value, times)
            part, sums = _FLASH(_by_head(query), keys, values, 0.0, False, scale=scale)
            joined = torch.logaddexp(total, sums)
            out = out * (total - joined).exp()[..., None] + part * (sums - joined).exp()[..., None]
            total = joined
        result: Tensor = out.to(query.dtype)
        ctx.scale = scale
        ctx.before = before
        ctx.save_for_backward(query, key, value, result, total)
        return result[0].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        times = query.size(1) // key.size(1)

        def shares(keys: Tensor, values: Tensor, *, causal: bool) -> list[Tensor]:
            tensors = (
                _by_head(gradients[0]),
                _by_head(query),
                _by_head(keys, times),
                _by_head(values, times),
                out,
                total,
            )
            of_query, *others = (
                gradient[0].transpose(0, 1) for gradient in _FLASH_BACKWARD(*tensors, 0.0, causal, scale=ctx.scale)
            )
            return [
                of_query,
                *(gradient.unflatten(1, (-1, times)).sum(2) if times > 1 else gradient for gradient in others),
            ]

        of_query, of_key, of_value = shares(key, value, causal=True)
        for piece in ctx.before:
            part, *of_piece = shares(piece.key, piece.value, causal=False)
            of_query = of_query + part
            piece.add(*of_piece)
        return None, of_query, of_key, of_value, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _by_head(tensor: Tensor, times: int = 1) -> Tensor:
    """[1, heads, positions, channels] of [positions, groups, channels], each group for so many heads."""
    return tensor.repeat_interleave(times, 1).transpose(0, 1)[None] if times > 1 else tensor.transpose(0, 1)[None]


def attend_pieces_in_kernel(
    query: Tensor, key: Tensor, value: Tensor, row: PackedRow, kept: KeptKeys, attend: Callable[..., Tensor]
) -> Tensor:
    """One causal kernel (`attend`) over all segments of a row with pieces; otherwise as `attend_by_sample`."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    starts = row.starts()
    done = 0
    for segment, cut in sorted(row.cuts.items()):
        if cut.start:
            before = [piece.read() for piece in kept.before(cut)]
            keys += [key[done : starts[segment]], *(keys for keys, _ in before)]
            values += [value[done : starts[segment]], *(values for _, values in before)]
            done = starts[segment]
    keys.append(key[done:])
    values.append(value[done:])
    joined_keys = torch.cat(keys)
    joined_values = torch.cat(values)
    with joined_again((joined_keys, keys), (joined_values, values)):
        return attend(query, joined_keys, joined_values, row, causal=True)


def _picked(tensor: Tensor, places: Tensor, count: int) -> Tensor:
    """[n, positions, …] of a row's positions."""
    return tensor.index_select(0, places).view(count, -1, *tensor.shape[1:])


def _mask(
    group: SegmentGroup, bias: Tensor | None, query: Tensor, row: PackedSeqParams, *, causal: bool
) -> Tensor | None:
    """The mask added to a group's scores, or the keys to look at; causal attention sees no padded key anyway."""
    if group.apart is not None:
        assert isinstance(row, PackedRow), "a share of a planned row"
        return row.later_keys(group.apart, query)
    if bias is None:
        return None if causal else group.real_keys
    corner = bias[:, :, : group.queries, : group.keys].to(query.dtype)
    if group.real_keys is None or causal:
        return corner
    return corner.masked_fill(~group.real_keys, -math.inf)


def segment_lengths(row: PackedSeqParams) -> tuple[list[int], list[int]]:
    """Queries and keys of every segment; from offsets on a device they are read, which waits for it."""
    if isinstance(row, PackedRow):
        return list(row.lengths_q), list(row.lengths_kv)
    return row.cu_seqlens_q.diff().tolist(), row.cu_seqlens_kv.diff().tolist()
