"""Comparing what ranks learned: parameters by their names and places in the whole model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_dynapipe.tools.certify.parts import errors_by_name, relative_error, whole

TOLERANCE = 1e-5
"""Of layouts in fp32 compared with their reference: several times what rounding comes to."""


def assert_trained_alike(results: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Gradients of the first iteration, losses and gradient norms of all: of every rank, as the reference's."""
    assert_close(gradients_of(results), gradients_of([expected]), TOLERANCE)
    for result in results:
        assert result["tokens"] == expected["tokens"]
        assert result["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert result["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    errors = errors_by_name(actual, expected)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, (worst, errors[worst])


def of_the_largest(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any two elements, as a part of the largest element."""
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((actual[name] - tensor).abs().max()) for name, tensor in expected.items()) / largest


def gradients_of(results: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole model's gradients from every rank's results."""
    return whole([result["gradients"] for result in results])


def deviation(results: Sequence[dict[str, Any]], expected: dict[str, Any]) -> tuple[float, float]:
    """Relative distance of all gradients together, and of the losses, from the reference's."""
    both = gradients_of(results), gradients_of([expected])
    gradients = [torch.cat([tensors[name].flatten() for name in sorted(both[1])]) for tensors in both]
    losses = [torch.tensor(of["losses"]) for of in (results[-1], expected)]
    return relative_error(*gradients), relative_error(*losses)
