"""The parameters of a model that many ranks hold in parts, put together and compared."""

import math
from collections.abc import Sequence

import torch

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.certify.records import Part


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of two tensors over the length of the second; infinite where either holds what is not a number."""
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


def whole(ranks: Sequence[Sequence[Part]], *, tolerance: float = 1e-5) -> dict[str, torch.Tensor]:
    """The whole model's tensors, by name, from every rank's parts.

    Raises:
        DataError: two ranks hold the same part and differ.
    """
    tensors: dict[str, torch.Tensor] = {}
    first: dict[tuple[str, tuple[int, ...]], tuple[int, torch.Tensor]] = {}
    for rank, parts in enumerate(ranks):
        for name, offset, shape, part in parts:
            other, known = first.setdefault((name, tuple(offset)), (rank, part))
            if not torch.allclose(part, known, rtol=0, atol=0, equal_nan=True):
                error = relative_error(part, known)
                if not error < tolerance:
                    raise DataError(f"{name}: the copies of ranks {other} and {rank} differ by {error:.1e}")
            tensor = tensors.setdefault(name, torch.zeros(shape))
            leading = [1] * (len(offset) - part.dim())
            lengths = (*leading, *part.shape)
            place = tuple(slice(at, at + length) for at, length in zip(offset, lengths, strict=True))
            tensor[place] = part
    return tensors


def errors_by_name(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of every tensor above rounding; names must agree."""
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    compared = above_rounding(expected)
    return {name: relative_error(actual[name], tensor) for name, tensor in compared.items()}


def above_rounding(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients without those far below the largest.

    A key's bias shifts all scores of a query alike, so that its gradient is zero but for rounding.
    """
    norms = {name: float(tensor.norm()) for name, tensor in gradients.items()}
    largest = max(norms.values())
    return {name: tensor for name, tensor in gradients.items() if not norms[name] <= 1e-5 * largest}
