"""Norms."""

from typing import Any

import torch
from torch import Tensor, nn


def normalized(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, kind: str, eps: float, centered: bool) -> Tensor:
    """The norm of the last dimension, computed in fp32, in the inputs' dtype."""
    scale = weight.float() + centered
    if kind == "RMSNorm":
        return nn.functional.rms_norm(inputs.float(), scale.shape, scale, eps).to(inputs.dtype)
    shift = None if bias is None else bias.float()
    return nn.functional.layer_norm(inputs.float(), scale.shape, scale, shift, eps).to(inputs.dtype)


class LayerNorm(nn.Module):
    """A norm whose parameters say whether sequence parallelism divides what they see."""

    kind = "LayerNorm"

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        empty = torch.empty(normalized_shape, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(empty.fill_(0.0 if zero_centered_gamma else 1.0))
        self.bias = nn.Parameter(torch.zeros_like(empty)) if self.kind == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "fp8 is not rehearsed"

    def forward(self, inputs: Tensor) -> Tensor:
        centered = self.zero_centered_gamma
        return normalized(inputs, self.weight, self.bias, kind=self.kind, eps=self.eps, centered=centered)


class RMSNorm(LayerNorm):
    kind = "RMSNorm"
