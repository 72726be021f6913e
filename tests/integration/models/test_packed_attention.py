"""Attention over packed rows is that of every sample by itself."""

import functools

import pytest

from tests.helpers.processes import run_ranks

RANKS = "tests.integration.models.packed_ranks"


ROW = [3, 1, 7, 3, 1, 1]
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
}


@functools.cache
def differences() -> dict[str, list[float]]:
    found = run_ranks(f"{RANKS}:compare_all", 1, {"cases": list(CASES.values())})[0]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_samples_of_a_row_attend_as_if_alone(name):
    assert max(differences()[name]) < 1e-5


def test_no_queries_are_without_keys():
    """cuDNN before 9.25 gives NaN for them, and NaN times a mask's zero is NaN."""
    cases = [([3, 2, 3], [4, 4, 0]), ([3, 2, 0], [4, 4, 0]), ([3, 2, 3], [4, 4, 1])]
    assert run_ranks(f"{RANKS}:tails", 1, {"cases": cases})[0] == [
        [[0, 3, 8], [0, 4, 8]],
        [[0, 3, 5, 5], [0, 4, 8, 8]],
        [[0, 3, 5, 8], [0, 4, 8, 9]],
    ]


def test_segments_that_do_not_cover_the_row_are_refused():
    message = run_ranks(f"{RANKS}:refuse", 1)[0]
    assert message == "expected segments of 9 queries and 9 keys, got 8 and 9"


def test_what_the_kernel_takes():
    assert run_ranks(f"{RANKS}:which", 1)[0] == {
        "half": True,
        "fp32": False,
        "on a CPU": False,
        "dropout": False,
        "biases": False,
        "heads too large": False,
        "odd heads": False,
        "cuDNN": False,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[5] == "samples" and not case[4]])
def test_the_kernel_attends_as_samples_one_by_one_do(name):
    """In bf16, whose rounding the bound is of; segments without queries too."""
    import torch

    from megatron_dynapipe.integration.models.packed_attention import attend_by_sample, attend_in_kernel
    from tests.integration.models.packed_ranks import inputs, row_of

    queries, keys, causal, groups, *_ = CASES[name]
    row = row_of(queries, keys)
    row.cu_seqlens_q, row.cu_seqlens_kv = row.cu_seqlens_q.cuda(), row.cu_seqlens_kv.cuda()
    *tensors, gradient = (tensor.squeeze(1).cuda().bfloat16() for tensor in inputs(queries, keys, groups))

    def one(query, key, value, mask):
        given = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *given, attn_mask=mask, is_causal=causal, scale=0.3, enable_gqa=groups < query.size(2)
        )
        return attended.transpose(1, 2)

    found = []
    for attend in (
        lambda *given: attend_in_kernel(*given, row, causal=causal, scale=0.3),
        lambda *given: attend_by_sample(*given, row, one, None, causal=causal),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        result = attend(*leaves)
        result.backward(gradient.view_as(result))
        found.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
