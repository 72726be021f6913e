"""Attention over packed rows is that of every sample by itself."""

import functools

import pytest

from tests.helpers.processes import run_ranks


def call(rank: int, world_size: int, function: str, **arguments: object) -> object:
    """Run a function of `packed_ranks`, whose import of Megatron only the ranks should see."""
    from tests.integration.models import packed_ranks

    return getattr(packed_ranks, function)(rank, world_size, **arguments)


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
    found = run_ranks(call, 1, {"function": "compare_all", "cases": list(CASES.values())})[0]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_samples_of_a_row_attend_as_if_alone(name):
    assert max(differences()[name]) < 1e-5


def test_segments_that_do_not_cover_the_row_are_refused():
    message = run_ranks(call, 1, {"function": "refuse"})[0]
    assert message == "expected segments of 9 queries and 9 keys, got 8 and 9"


def test_what_the_kernel_takes():
    assert run_ranks(call, 1, {"function": "which"})[0] == {
        "half": True,
        "fp32": False,
        "on a CPU": False,
        "dropout": False,
        "biases": False,
        "heads too large": False,
        "odd heads": False,
        "cuDNN": False,
    }
