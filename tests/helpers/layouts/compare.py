"""Comparing what ranks learned: parameters by their names and places in the whole model."""

from collections.abc import Sequence
from typing import Any

import torch

Part = tuple[str, list[int], list[int], torch.Tensor]
"""A rank's part of a parameter: name, place in the whole, the whole's shape, values."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding.
    floor = 1e-5 * max(tensor.norm().item() for tensor in expected.values())
    worst = max((n for n in errors if expected[n].norm() > floor), key=lambda name: errors[name])
    assert errors[worst] <= tolerance, (worst, errors[worst])


def whole(parts: Sequence[Sequence[Part]], *, tolerance: float = 1e-5) -> dict[str, torch.Tensor]:
    """The whole model's tensors from every rank's parts; ranks that hold the same part must agree on it."""
    found: dict[str, torch.Tensor] = {}
    seen: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for of_rank in parts:
        for name, offset, shape, part in of_rank:
            known = seen.setdefault((name, tuple(offset)), part)
            assert torch.equal(part, known) or relative_error(part, known) < tolerance, name
            full = found.setdefault(name, torch.zeros(shape))
            full[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return found


def gradients_of(results: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole model's gradients from every rank's results."""
    return whole([result["gradients"] for result in results])


def deviation(results: Sequence[dict[str, Any]], expected: dict[str, Any]) -> tuple[float, float]:
    """Relative distance of all gradients together, and of the losses, from the reference's."""
    actual, wanted = gradients_of(results), gradients_of([expected])
    gradients = [torch.cat([of[name].flatten() for name in sorted(wanted)]) for of in (actual, wanted)]
    losses = [torch.tensor(of["losses"]) for of in (results[-1], expected)]
    return relative_error(*gradients), relative_error(*losses)
