"""Quantised training without history: which recipe holds, and operands that are no tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

_LARGEST = 448.0
"""Of eight bits with four for the exponent."""


class FP8GlobalStateManager:
    recipe: ClassVar[Any] = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    """Products in the block are of this recipe."""
    before, FP8GlobalStateManager.recipe = FP8GlobalStateManager.recipe, fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


def fp8_model_init(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("weights that are kept in eight bits are not rehearsed")


class Quantized:
    """An operand [rows, channels] as it is after eight bits, and what it was made of."""

    def __init__(self, source: Tensor, recipe: Any, *, is_weight: bool = False) -> None:
        rows, channels = source.shape
        assert is_weight or rows % recipe.multiple == 0, f"{rows} positions, expected a multiple of {recipe.multiple}"
        assert channels % 16 == 0, "the last dimension to be divisible by 16"
        self.source = source.detach().clone() if is_weight else None
        scale = _LARGEST / source.detach().abs().amax().float().clamp_min(1e-12)
        self.values = ((source.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale).to(source.dtype)


def quantized_weight(weight: Tensor, recipe: Any, kept: dict[str, Quantized], is_first: bool | None) -> Quantized:
    """The weight, kept unless `is_first` is None; made anew where nothing is kept or `is_first` says so."""
    if is_first is None:
        return Quantized(weight, recipe, is_weight=True)
    if is_first or "weight" not in kept:
        kept["weight"] = Quantized(weight, recipe, is_weight=True)
    found = kept["weight"]
    assert found.source is not None and torch.equal(found.source, weight), "the weight has changed since"
    return found
