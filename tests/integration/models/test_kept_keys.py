"""Attention of a sample in pieces is that of the whole sample."""

import functools

import pytest

from tests.helpers.processes import run_ranks

RANKS = "tests.integration.models.kept_keys_ranks"


CASES = {
    # groups, whether recomputed, how
    "kept": (4, False, "samples"),
    "recomputed": (4, True, "samples"),
    "two groups": (2, False, "samples"),
    "two groups, recomputed": (2, True, "samples"),
    "masks": (2, False, "masks"),
    "masks, recomputed": (4, True, "masks"),
    "the kernel's arguments": (2, False, "kernel"),
    "the kernel's arguments, recomputed": (4, True, "kernel"),
}


@functools.cache
def differences() -> dict[str, list[float]]:
    found = run_ranks(f"{RANKS}:compare_all", 1, {"cases": list(CASES.values())})[0]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_pieces_attend_as_the_whole_sample_and_others_of_their_rows_as_if_alone(name):
    assert max(differences()[name]) < 1e-5


@pytest.mark.gpu
def test_pieces_in_the_kernel_attend_as_the_whole_sample():
    """Within bf16's rounding of sums."""
    assert all(max(found) < 0.1 for found in run_ranks(f"{RANKS}:compare_on_gpu", 1)[0])


def test_a_piece_without_those_before_it_is_refused_and_a_broken_iteration_is_cleared_away():
    assert run_ranks(f"{RANKS}:refuse", 1)[0] == {
        "first": "expected keys of 7 earlier positions of sample 5, found 0",
        "kept": "2",
        "cleared": "0",
    }
