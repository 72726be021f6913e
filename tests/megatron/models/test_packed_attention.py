"""Attention over packed rows is that of every sample by itself."""

import contextlib
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.megatron.models import packed_attention, relative_attention
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.engine_attention import ENGINE, EngineCoreAttention, has_fused_kernel
from megatron_dynapipe.megatron.models.packed_attention import attend_by_sample, kernel_takes
from megatron_dynapipe.megatron.models.relative_attention import BLOCK, LEAST, _blocks, attend_with_biases
from tests.helpers.processes import in_ranks
from tests.megatron.models.attention_ranks import (
    BY_ENGINE,
    CHANNELS,
    HEADS,
    assert_alike,
    by_kernel,
    config,
    inputs,
    kernel,
    on_device,
    row_of,
    run,
    start,
)

SCALE = 0.3
ROW = [3, 1, 7, 3, 1, 1]
LONG = [100, 200, 3, 77, 128, 4]
CASES = {
    # queries and keys of each segment (the last is the tail), causal, groups, biases, how
    "of a decoder": (ROW, ROW, True, 4, False, "samples"),
    "of an encoder, a row without a tail": ([5, 2, 0], [5, 2, 0], False, 4, False, "samples"),
    "of a decoder to an encoder": (ROW, [2, 9, 4, 2, 9, 3], False, 4, False, "samples"),
    "no tail of keys": ([3, 2, 3], [4, 4, 0], False, 4, False, "samples"),
    "no tail of queries": ([3, 5, 0], [4, 2, 2], False, 4, False, "samples"),
    "two groups": (ROW, ROW, True, 2, False, "samples"),
    "biases": (ROW, ROW, False, 4, True, "samples"),
    "biases, causal": (ROW, ROW, True, 4, True, "samples"),
    "Megatron's format thd": (ROW, ROW, True, 4, False, "thd"),
    "the kernel's arguments": (ROW, ROW, True, 2, False, "kernel"),
    "the kernel's arguments, to an encoder": ([3, 2, 3], [4, 4, 0], False, 4, False, "kernel"),
    "Transformer Engine's arguments": (ROW, ROW, True, 2, False, "engine"),
    "Transformer Engine's arguments, to an encoder": ([3, 2, 3], [4, 4, 0], False, 4, False, "engine"),
}


def distances_of(longest: int) -> Tensor:
    return torch.arange(longest)[None] - torch.arange(longest)[:, None] + longest - 1


@in_ranks(1)
def test_samples_of_a_row_attend_as_if_alone():
    start()
    for name, case in CASES.items():
        try:
            attends_as_alone(*case)
        except AssertionError as error:
            raise AssertionError(name) from error


def attends_as_alone(queries: list[int], keys: list[int], causal: bool, groups: int, biased: bool, how: str) -> None:
    of = EngineCoreAttention if how == "engine" else SdpaCoreAttention
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    attention = of(config(num_query_groups=groups), 1, kind, "self")
    row, longest = row_of(queries, keys), max(queries)
    *tensors, gradient = inputs(sum(queries), sum(keys), groups)
    plain = PackedSeqParams(qkv_format="thd", cu_seqlens_q=row.cu_seqlens_q, cu_seqlens_kv=row.cu_seqlens_kv)

    def bias_of(tables: tuple[Tensor, ...]) -> Tensor | None:
        return tables[0][:, distances_of(longest)][None] if tables else None

    def packed(*parts: Tensor) -> Tensor:
        heads, bias = parts[:3], bias_of(parts[3:])
        if how == "thd":  # as Megatron's attention hands them over
            heads = (tensor.squeeze(1) for tensor in heads)
            return attention(*heads, None, packed_seq_params=plain, attention_bias=bias)
        with kernel(how) if how in ("kernel", "engine") else contextlib.nullcontext():
            return attention(*heads, None, packed_seq_params=row, attention_bias=bias)

    def one_by_one(query: Tensor, key: Tensor, value: Tensor, *tables: Tensor) -> Tensor:
        bias, results = bias_of(tables), []
        samples = query.split(row.lengths_q), key.split(row.lengths_kv), value.split(row.lengths_kv)
        for q, k, v in zip(*samples, strict=True):
            corner = None if bias is None else bias[:, :, : len(q), : len(k)]
            results.append(attention(q, k, v, None, attention_bias=corner))
        return torch.cat(results)

    leaves = [*tensors, torch.randn(HEADS, 2 * longest - 1)] if biased else tensors
    assert_alike(run(packed, leaves, gradient), run(one_by_one, leaves, gradient), atol=1e-5)


def attend_to_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = False, scale: float = SCALE
) -> Tensor:
    given = (tensor.transpose(1, 2) for tensor in (query, key, value))
    enable = {"enable_gqa": key.size(2) < query.size(2), "scale": scale}
    return scaled_dot_product_attention(*given, attn_mask=mask, is_causal=causal, **enable).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("lengths", "groups"), [(ROW, 4), (LONG, 2)])
def test_relative_biases_in_one_kernel(lengths, groups, causal, monkeypatch):
    """`flex_attention` as it runs without being compiled: the attention sample by sample, gradients of biases too."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # compiled, it has no backward on a CPU
    compare_biases(lengths, groups, causal=causal, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3], LONG, [640, 0], [128, 256, 130, 0], [300, 1, 400, 67]], ids=str)
def test_blocks_with_and_without_a_mask_cover_the_pairs_of_each_sample(lengths, causal):
    padded = [*lengths, max(LEAST - sum(lengths), 0)]
    of = torch.arange(len(padded)).repeat_interleave(torch.tensor(padded))
    pairs = (of[:, None] == of) & torch.ones(len(of), len(of), dtype=torch.bool).tril(0 if causal else len(of))
    blocks = -(-len(of) // BLOCK)
    square = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    square[: len(of), : len(of)] = pairs
    square = square.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2).flatten(2)
    counts, indices = _blocks(row_of(lengths, lengths), causal=causal)
    assert counts.shape == (4, 1, 1, blocks) and indices.shape == (4, 1, 1, blocks, blocks)
    for at, (full, expected) in enumerate(
        (full, each) for each in (square, square.transpose(0, 1)) for full in (False, True)
    ):
        listed = torch.zeros(blocks, blocks, dtype=torch.bool)
        for block, (count, order) in enumerate(zip(counts[at, 0, 0], indices[at, 0, 0], strict=True)):
            assert sorted(order) == list(range(blocks))
            listed[block, torch.from_numpy(order[:count])] = True
        every = expected.all(-1)
        assert torch.equal(listed, every if full else expected.any(-1) & ~every)


@pytest.mark.parametrize(
    ("queries", "keys", "offsets"),
    [
        ([3, 2, 3], [4, 4, 0], [[0, 3, 8], [0, 4, 8]]),
        ([3, 2, 0], [4, 4, 0], [[0, 3, 5, 5], [0, 4, 8, 8]]),
        ([3, 2, 3], [4, 4, 1], [[0, 3, 5, 8], [0, 4, 8, 9]]),
    ],
)
def test_no_queries_are_without_keys(queries, keys, offsets):
    """cuDNN before 9.25 gives NaN for them, and NaN times a mask's zero is NaN."""
    row = row_of(queries, keys)
    assert [row.cu_seqlens_q.tolist(), row.cu_seqlens_kv.tolist()] == offsets
    assert row.lengths_q == tuple(row.cu_seqlens_q.diff().tolist()) and row.max_seqlen_q == max(row.lengths_q)


@pytest.mark.gpu
def test_relative_biases_compiled_once_are_those_by_sample():
    """`flex_attention` in fp32 on the device; gradients of biases too. Rows with and without whole blocks."""
    for number, lengths in enumerate(([300, 84, 7], [20, 9], [100, 156], [600, 300])):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            compare_biases(lengths, 4, 32, causal=True, device="cuda", atol=2e-2, rtol=1e-2)


def test_rows_of_any_number_of_blocks_are_one_graph(monkeypatch):
    """Blocks of the first row are as many as the heads. Dynamo's graphs alone; the kernel itself takes a device."""
    traced = torch.compile(relative_attention.flex.flex_attention, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(relative_attention, "_attend", lambda device: traced)
    for number, lengths in enumerate(([300, 84, 7], [20, 9], [100, 156], [600, 300])):
        query, key, value, _ = (t.squeeze(1) for t in inputs(sum(lengths), sum(lengths), 4, channels=32))
        bias = torch.arange(8.0 * max(lengths)).sin().view(4, -1)[:, distances_of(max(lengths))][None]
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=number > 0):
            attended = attend_with_biases(query, key, value, row_of(lengths, lengths), bias, causal=True, scale=SCALE)
        assert attended.shape == query.shape


def compare_biases(lengths, groups, channels=CHANNELS, *, causal, device="cpu", **bounds: float) -> None:
    """The kernel on a device, against attention sample by sample on the CPU."""
    longest = max(lengths)
    *tensors, gradient = (t.squeeze(1) for t in inputs(sum(lengths), sum(lengths), groups, channels=channels))
    leaves = [*tensors, torch.arange(4 * 2 * longest - 4.0).sin()]

    def bias_of(table: Tensor) -> Tensor:
        return table.view(4, -1)[:, distances_of(longest).to(table.device)][None]

    def by_sample(query, key, value, table):
        hidden = torch.ones(longest, longest, dtype=torch.bool).triu(1) & causal
        bias = bias_of(table).masked_fill(hidden, -torch.inf)
        return attend_by_sample(query, key, value, row_of(lengths, lengths), attend_to_one, bias, causal=causal)

    def in_kernel(query, key, value, table):
        row = on_device(row_of(lengths, lengths), device)
        return attend_with_biases(query, key, value, row, bias_of(table), causal=causal, scale=SCALE)

    ours = run(in_kernel, [leaf.to(device) for leaf in leaves], gradient.to(device))
    assert all(tensor is not None for tensor in ours), "rehearsed uncompiled, biases get no gradient"
    assert_alike([tensor.cpu() for tensor in ours], run(by_sample, leaves, gradient), **bounds)


@in_ranks(1)
def test_segments_that_do_not_cover_the_row_are_refused_and_cudnn_is_out_of_the_choice():
    start()
    attention = SdpaCoreAttention(config(), 1, AttnMaskType.causal, "self")
    with pytest.raises(PlanError, match="expected segments of 9 queries and 9 keys, got 8 and 9"):
        attention(*inputs(9, 9)[:3], None, packed_seq_params=row_of([5, 3], [5, 4]))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"dtype": "float32"}, False),
        ({"on_cuda": False}, False),
        ({"dropout": True}, False),
        ({"biased": True}, False),
        ({"channels": 264}, False),
        ({"channels": 60}, False),
    ],
)
def test_what_the_kernel_takes(changes, takes):
    given = {"dtype": "bfloat16", "channels": 128, "on_cuda": True, "dropout": False, "biased": False} | changes
    assert kernel_takes(getattr(torch, given.pop("dtype")), given.pop("channels"), **given) is takes


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [CHANNELS, 64, 128])
@pytest.mark.parametrize("engine", BY_ENGINE)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[5] == "samples" and not case[4]])
def test_the_kernel_attends_as_samples_one_by_one_do(name, engine, channels):
    """In bf16, whose rounding the bound is of, against fp32; segments without queries too."""
    queries, keys, causal, groups, *_ = CASES[name]
    row, scale = on_device(row_of(queries, keys), "cuda"), channels**-0.5
    made = inputs(sum(queries), sum(keys), groups, channels=channels)
    *tensors, gradient = (tensor.squeeze(1).cuda().bfloat16() for tensor in made)
    of = EngineCoreAttention if engine else SdpaCoreAttention
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    module = of(config(num_query_groups=groups), 1, kind, "self", softmax_scale=scale)
    if engine and channels > CHANNELS:
        masks = ("padding_causal", "padding_causal_bottom_right") if causal else ("padding",)
        assert all(has_fused_kernel(HEADS, groups, channels, torch.bfloat16, mask) for mask in masks)

    def in_kernel(*heads: Tensor) -> Tensor:
        return module.attend_in_kernel(*heads, row, causal=causal)

    def by_sample(*heads: Tensor) -> Tensor:
        attend = partial(attend_to_one, causal=causal, scale=scale)
        return attend_by_sample(*heads, row, attend, None, causal=causal)

    ours = [tensor.float() for tensor in run(in_kernel, tensors, gradient)]
    exact = run(by_sample, [tensor.float() for tensor in tensors], gradient.float())
    assert_alike(ours, exact, atol=0.02, rtol=0.02)


def test_what_transformer_engine_has_no_kernel_for_runs_in_pytorchs(monkeypatch, capsys):
    """It is asked once for each kind of row, in its own words; and never to attend unfused."""
    asked = []

    def answer(params):
        asked.append(params)
        return False, None, False, None, True, [False, False, True]

    module = EngineCoreAttention(config(), 1, AttnMaskType.causal, "self")
    *tensors, _ = (tensor.squeeze(1) for tensor in inputs(sum(ROW), sum(ROW)))
    with kernel("engine"):
        utils = sys.modules[f"{ENGINE}.attention.dot_product_attention.utils"]
        monkeypatch.setattr(utils, "get_attention_backend", answer)
        monkeypatch.setattr(utils, "get_cudnn_version", lambda: (9, 14, 0), raising=False)
        monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
        has_fused_kernel.cache_clear()
        for _ in range(2):
            with mock.patch.object(packed_attention, "varlen_attn", by_kernel):
                attended = module.attend_in_kernel(*tensors, row_of(ROW, ROW), causal=True)
    has_fused_kernel.cache_clear()
    assert attended.shape == tensors[0].shape
    (params,) = asked
    assert params["attn_mask_type"] == "padding_causal" and params["window_size"] == (-1, 0)
    assert params["head_dim_qk"] == CHANNELS and params["qkv_layout"] == "thd_thd_thd"
    said = "no fused attention for heads of 8 channels, float32, mask padding_causal: PyTorch's FlashAttention runs"
    printed = capsys.readouterr().out
    assert printed.count(said) == 1
    assert "it has opened cuDNN 9.14.0 next to PyTorch's 9.19.0" in printed and "set CUDNN_HOME" in printed


@pytest.mark.parametrize(("error", "runs"), [(None, True), (ImportError("undefined symbol"), False)])
def test_flash_attention_3_that_cannot_be_imported_is_said_and_left(error, runs, monkeypatch, capsys):
    def activate(name):
        assert name == "FA3"
        if error:
            raise error

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn_interface" or None)
    monkeypatch.setattr(packed_attention, "activate_flash_attention_impl", activate)
    assert packed_attention.activate_flash_3.__wrapped__(torch.device("cuda")) is runs
    assert ("not for this PyTorch: undefined symbol; version 2 runs" in capsys.readouterr().out) is not runs
