"""Stand-ins for gradients of weights that were added to `main_grad`."""

import torch
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A tensor that holds nothing, or zeros."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype, device="cuda")
