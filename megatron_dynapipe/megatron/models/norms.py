"""The norm of Megatron's local layers, also under sequence parallelism and with residuals in fp32."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import layer_norm, rms_norm

from megatron_dynapipe.core.errors import ConfigError

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class _Fp32LayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch names it so)
        weight = self.weight.float()
        bias = self.bias.float()
        return layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class _Fp32RMSNorm(torch.nn.RMSNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch names it so)
        normed = rms_norm(input.float(), list(self.normalized_shape), self.weight.float(), self.eps)
        return normed.to(self.weight.dtype)


_FP32_NORMS = {"LayerNorm": _Fp32LayerNorm, "RMSNorm": _Fp32RMSNorm}


class LocalNorm:
    """PyTorch's LayerNorm or RMSNorm, as `config.normalization` says, where Megatron's wrapper of them does not serve.

    Each rank norms its part of a sequence, so that the gradients of the norm's weights are to be summed over the
    tensor-parallel ranks. Megatron's finalisation does this for parameters with the attribute `sequence_parallel`;
    its own wrapper of these norms does not set it and refuses sequence parallelism instead.

    With `config.fp32_residual_connection` the input is fp32: it is normed so, and the result has the weights' type,
    as that of apex's and Transformer Engine's norms. PyTorch's want weights of their input's type.

    Raises:
        ConfigError: another kind of norm, or weights centred around zero, which PyTorch's norms do not have.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """The norm of a hidden size; Megatron calls a norm's class for it."""
        if config.normalization not in _NORMS or config.layernorm_zero_centered_gamma:
            centred = ", centred around zero" if config.layernorm_zero_centered_gamma else ""
            raise ConfigError(
                f"expected --normalization LayerNorm or RMSNorm, got {config.normalization}{centred}",
                hint="use --transformer-impl transformer_engine for other norms",
            )
        kinds = _FP32_NORMS if config.fp32_residual_connection else _NORMS
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm
