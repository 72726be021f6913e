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
    "Transformer Engine's arguments": (2, False, "engine"),
    "Transformer Engine's arguments, recomputed": (4, True, "engine"),
}


@functools.cache
def differences() -> dict[str, list[float]]:
    found = run_ranks(f"{RANKS}:compare_all", 1, {"cases": list(CASES.values())})[0]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_pieces_attend_as_the_whole_sample_and_others_of_their_rows_as_if_alone(name):
    assert max(differences()[name]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [False, True])
def test_pieces_in_the_kernel_attend_as_the_whole_sample(engine):
    """Within bf16's rounding of sums."""
    if engine:
        pytest.importorskip("transformer_engine.pytorch")
    assert all(max(found) < 0.1 for found in run_ranks(f"{RANKS}:compare_on_gpu", 1, {"engine": engine})[0])


def test_a_piece_without_those_before_it_is_refused_and_a_broken_iteration_is_cleared_away():
    assert run_ranks(f"{RANKS}:refuse", 1)[0] == {
        "first": "expected keys of 7 earlier positions of sample 5, found 0",
        "kept": "2",
        "cleared": "0",
    }


@pytest.mark.parametrize(("pieces", "dtype"), [(3, "bfloat16"), (4, "float32"), (20, "float32")])
def test_gradients_of_many_later_pieces_are_summed_in_fp32(pieces, dtype):
    """In bf16 what is less than a 256th of a sum would be lost in it."""
    import torch

    from megatron_dynapipe.integration.models.kept_keys import KeptPiece

    kept = KeptPiece(0, 0, *torch.zeros(2, 2, 1, 4, dtype=torch.bfloat16))
    for piece in range(pieces):
        gradient = torch.full((2, 1, 4), 0.002 if piece else 1.0, dtype=torch.bfloat16)
        torch.autograd.backward(kept.read(), [gradient, gradient.clone()])
    assert {str(total.dtype) for total in kept.gradients} == {f"torch.{dtype}"}
    expected = 1 + 0.002 * max(0, pieces - 3)  # the first two are lost
    torch.testing.assert_close(kept.gradients[0].float(), torch.full((2, 1, 4), expected), rtol=0, atol=1e-4)
