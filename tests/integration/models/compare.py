"""Comparing gradients by their names in the whole model."""

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding.
    floor = 1e-5 * max(tensor.norm().item() for tensor in expected.values())
    worst = max((n for n in errors if expected[n].norm() > floor), key=lambda name: errors[name])
    assert errors[worst] <= tolerance, (worst, errors[worst])
