"""The norm of Megatron's local layers, also under sequence parallelism."""

from typing import Any

import torch
from megatron.core.models.T5.t5_spec import LNImpl
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.errors import ConfigError

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class SequenceParallelNorm:
    """PyTorch's LayerNorm or RMSNorm, as `config.normalization` says, for use with sequence parallelism.

    Each rank norms its part of a sequence, so that the gradients of the norm's weights are to be summed over the
    tensor-parallel ranks. Megatron's finalisation does this for parameters with the attribute `sequence_parallel`;
    its own wrapper of these norms does not set it and refuses sequence parallelism instead.

    Raises:
        ConfigError: another kind of norm, or weights centred around zero, which PyTorch's norms do not have.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """The norm of a hidden size; Megatron calls a norm's class for it."""
        if config.normalization not in _NORMS or config.layernorm_zero_centered_gamma:
            centred = ", centred around zero" if config.layernorm_zero_centered_gamma else ""
            raise ConfigError(
                f"expected --normalization LayerNorm or RMSNorm, got {config.normalization}{centred}",
                hint="use --transformer-impl transformer_engine for other norms",
            )
        norm: torch.nn.Module = _NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm


def local_norm(*, normalization: str, sequence_parallel: bool) -> Any:
    """The class of norms for local layers: Megatron's choice (apex's, if installed), ours where that would refuse."""
    theirs = WrappedTorchNorm if normalization == "RMSNorm" else LNImpl
    return SequenceParallelNorm if sequence_parallel and theirs is WrappedTorchNorm else theirs
