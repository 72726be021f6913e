"""What tests of attention run on a rank: Megatron's groups, a configuration, inputs, rows, and kernels by formulas."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.megatron.models.engine_attention import ENGINE
from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, PackedRow, attention_row

HEADS, CHANNELS = 4, 8


def start() -> None:
    dist.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)


def config(**changes: object) -> TransformerConfig:
    options = {
        "num_layers": 1,
        "hidden_size": HEADS * CHANNELS,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**(options | changes))


def inputs(queries: int, keys: int, groups: int = HEADS, samples: int = 1, channels: int = CHANNELS) -> list[Tensor]:
    """Query [q, samples, heads, channels], key and value [k, samples, groups, channels], the result's gradient."""
    draw = torch.Generator().manual_seed(0)
    of_keys = keys, samples, groups, channels
    shapes = (queries, samples, HEADS, channels), of_keys, of_keys, (queries, samples, HEADS * channels)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def run(attend: Callable[..., Tensor], tensors: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """The result and the gradients of the tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = attend(*leaves)
    result.backward(gradient.view_as(result))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def assert_alike(ours: Sequence[Tensor], theirs: Sequence[Tensor], atol: float, rtol: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def row_of(queries: Sequence[int], keys: Sequence[int]) -> PackedRow:
    """The row of segments of these lengths; the last of each is the tail."""
    made = []
    for lengths in (queries, keys):
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        host = RowSegments.of(starts, sum(lengths))
        made.append(DeviceSegments(host=host, offsets=host.offsets, positions=host.positions))
    return attention_row(made[0], made[0] if queries == keys else made[1])


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
        self.scale, self.mask = given.pop("softmax_scale"), given.pop("attn_mask_type")
        self.kind = given.pop("attention_type")
        assert given == {"attention_dropout": 0.0, "qkv_format": "thd"}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: object) -> Tensor:
        assert query.shape[1:] == (self.heads, self.channels) and key.shape[1:] == (self.groups, self.channels)
        assert given.pop("pad_between_seqs") is False
        offsets = given.pop("cu_seqlens_q"), given.pop("cu_seqlens_kv")
        longest = given.pop("max_seqlen_q"), given.pop("max_seqlen_kv")
        assert not given, "a module's mask and format are its own"
        assert self.mask in ("padding", "padding_causal", "padding_causal_bottom_right")
        if self.mask == "padding_causal" or self.kind == "self":  # causal from the top left
            assert torch.equal(*offsets)
        window = (-1, -1) if self.mask == "padding" else (-1, 0)
        attended = by_kernel(query, key, value, *offsets, *longest, scale=self.scale, window_size=window)
        return attended.flatten(1)


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """Rows are attended to in the "kernel" of PyTorch, or of Transformer Engine ("engine"), of its attention alone."""
    names = ("transformer_engine", ENGINE, f"{ENGINE}.attention.dot_product_attention.utils")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[ENGINE].DotProductAttention = EngineAttention
    modules[names[-1]].AttentionParams = dict
    modules[names[-1]].get_attention_backend = lambda _: (False, None, True, 1, False, [False, True, True])
    models = "megatron_dynapipe.megatron.models"
    with (
        patch(f"{models}.attention.kernel_takes", lambda *_, **__: True),
        patch(f"{models}.packed_attention.varlen_attn", by_kernel if name == "kernel" else None),
        patch.dict(sys.modules, modules),
    ):
        yield


def on_device(row: PackedRow, device: str) -> PackedRow:
    """The row, with its offsets and positions there; queries' offsets that are keys' stay one tensor."""
    of_self = row.cu_seqlens_q is row.cu_seqlens_kv
    row.cu_seqlens_q, row.positions = row.cu_seqlens_q.to(device), row.positions.to(device)
    row.cu_seqlens_kv = row.cu_seqlens_q if of_self else row.cu_seqlens_kv.to(device)
    return row


BY_ENGINE = (
    False,
    pytest.param(True, marks=pytest.mark.skipif(find_spec("transformer_engine") is None, reason="not installed")),
)
"""Whether tests on a GPU take Transformer Engine's attention."""
