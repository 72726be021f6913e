"""What the rank of the packed attention tests runs: packed rows beside the same samples one by one."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from unittest.mock import patch

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.integration.models import attention as attention_module
from megatron_dynapipe.integration.models import packed_attention
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention
from megatron_dynapipe.integration.models.engine_attention import EngineCoreAttention
from megatron_dynapipe.integration.models.packed_rows import DeviceSegments, PackedRow, RowFormat, attention_row
from tests.integration.models.attention_ranks import CHANNELS, HEADS, config, start

Case = tuple[list[int], list[int], bool, int, bool, str]


def row_of(queries: Sequence[int], keys: Sequence[int]) -> PackedRow:
    """The row of segments of these lengths; the last of each is the tail."""
    made = []
    for lengths in (queries, keys):
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        host = RowSegments.of(starts, sum(lengths))
        made.append(DeviceSegments(host=host, offsets=host.offsets, positions=host.positions))
    return attention_row(*made, RowFormat.LOCAL)


def inputs(queries: Sequence[int], keys: Sequence[int], groups: int) -> list[Tensor]:
    """Query [t, 1, heads, channels], key and value [s, 1, groups, channels], the gradient of the result."""
    draw = torch.Generator().manual_seed(0)
    shapes = (
        (sum(queries), 1, HEADS, CHANNELS),
        *((sum(keys), 1, groups, CHANNELS),) * 2,
        (sum(queries), 1, HEADS * CHANNELS),
    )
    return [torch.randn(shape, generator=draw) for shape in shapes]


def by_kernel(query: Tensor, key: Tensor, value: Tensor, *arguments: object, **options: object) -> Tensor:
    """`varlen_attn` as its documentation has it, by plain formulas."""
    offsets_q, offsets_k, longest_q, longest_k = arguments
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    assert type(longest_q) is int and longest_q == offsets_q.diff().max() and longest_k == offsets_k.diff().max()
    assert offsets_q[-1] == len(query) and offsets_k[-1] == len(key) == len(value)
    repeats = query.size(1) // key.size(1)
    result = torch.zeros_like(query)
    for segment in range(len(offsets_q) - 1):
        of_q = slice(offsets_q[segment], offsets_q[segment + 1])
        of_k = slice(offsets_k[segment], offsets_k[segment + 1])
        if of_k.start == of_k.stop:
            continue  # the kernel writes zeros
        keys, values = (tensor[of_k].repeat_interleave(repeats, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[of_q], keys) * options["scale"]
        if options["window_size"] == (-1, 0):
            later = 1 + keys.size(0) - scores.size(1)  # causal from the bottom right
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(later), -torch.inf)
        result[of_q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return result


class EngineAttention:
    """`DotProductAttention` of Transformer Engine 2.20 in format "thd", by plain formulas."""

    def __init__(self, heads: int, channels: int, **given: object) -> None:
        self.heads, self.groups, self.channels = heads, given.pop("num_gqa_groups"), channels
        self.scale = given.pop("softmax_scale")
        assert given == {"attention_dropout": 0.0, "qkv_format": "thd"}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: object) -> Tensor:
        assert query.shape[1:] == (self.heads, self.channels) and key.shape[1:] == (self.groups, self.channels)
        assert given["qkv_format"] == "thd" and given["pad_between_seqs"] is False
        offsets = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        mask = given["attn_mask_type"]
        assert mask in ("padding", "padding_causal", "padding_causal_bottom_right")
        if mask == "padding_causal":  # from the top left
            assert torch.equal(*offsets)
        window = (-1, -1) if mask == "padding" else (-1, 0)
        longest = given["max_seqlen_q"], given["max_seqlen_kv"]
        attended = by_kernel(query, key, value, *offsets, *longest, scale=self.scale, window_size=window)
        return attended.flatten(1)


@contextlib.contextmanager
def engine_on_path() -> Iterator[None]:
    """Transformer Engine's package, of its attention alone."""
    package, inner = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    inner.DotProductAttention = EngineAttention  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {"transformer_engine": package, "transformer_engine.pytorch": inner}):
        yield


def compare_all(rank: int, world_size: int, cases: list[Case]) -> list[list[float]]:
    start()
    return [compare(*case) for case in cases]


def compare(queries: list[int], keys: list[int], causal: bool, groups: int, biased: bool, how: str) -> list[float]:
    """Largest difference of result and gradients from the samples one by one; `how` the row is attended to."""
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    of = EngineCoreAttention if how == "engine" else SdpaCoreAttention
    attention = of(config(num_query_groups=groups), 1, kind, "self")
    row, tensors = row_of(queries, keys), inputs(queries, keys, groups)
    longest = max(queries)
    table = torch.randn(HEADS, 2 * longest - 1) if biased else None
    distances = torch.arange(longest)[None] - torch.arange(longest)[:, None] + longest - 1
    plain = PackedSeqParams(qkv_format="thd", cu_seqlens_q=row.cu_seqlens_q, cu_seqlens_kv=row.cu_seqlens_kv)

    def packed(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        if how == "thd":  # as Megatron's attention hands them over
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
            return attention(query, key, value, None, packed_seq_params=plain, attention_bias=bias)
        if how == "kernel":
            with (
                patch.object(attention_module, "kernel_takes", lambda *_, **__: True),
                patch.object(packed_attention, "varlen_attn", by_kernel),
            ):
                return attention(query, key, value, None, packed_seq_params=row)
        if how == "engine":
            with patch.object(attention_module, "kernel_takes", lambda *_, **__: True), engine_on_path():
                return attention(query, key, value, None, packed_seq_params=row)
        return attention(query, key, value, None, packed_seq_params=row, attention_bias=bias)

    def one_by_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        parts = query.split(row.lengths_q), key.split(row.lengths_kv), value.split(row.lengths_kv)
        results = []
        for q, k, v in zip(*parts, strict=True):
            corner = None if bias is None else bias[:, :, : len(q), : len(k)]
            results.append(attention(q, k, v, None, attention_bias=corner))
        return torch.cat(results)

    found = []
    for attend in (packed, one_by_one):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        leaf = None if table is None else table.clone().requires_grad_()
        result = attend(*leaves, None if leaf is None else leaf[:, distances][None])
        result.backward(tensors[3])
        found.append([result.detach(), *(x.grad for x in (*leaves, leaf) if x is not None)])
    assert [x.shape for x in found[0]] == [x.shape for x in found[1]]
    return [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]


def refuse(rank: int, world_size: int) -> tuple[str, bool]:
    """What is said of segments that do not cover the row; whether cuDNN is left in the choice."""
    start()
    attention = SdpaCoreAttention(config(), 1, AttnMaskType.causal, "self")
    query, key, value, _ = inputs([5, 4], [5, 4], HEADS)
    said = "nothing"
    try:
        attention(query, key, value, None, packed_seq_params=row_of([5, 3], [5, 4]))
    except PlanError as error:
        said = str(error)
    return said, torch.backends.cuda.cudnn_sdp_enabled()
