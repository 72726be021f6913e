"""Recomputation of activations, chosen by the plan for each micro-batch and switched on the built modules.

Megatron fixes `--recompute-granularity` when it builds a model, as attributes that its modules look at in every
forward pass. A recomputation runs inside the micro-batch's backward pass and looks at them again, so they are set to
the micro-batch's mode before both passes.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags.checks import RECOMPUTE_MODULES
from megatron_dynapipe.units import Recompute


class RecomputeSwitch:
    """Sets a rank's modules to a mode of recomputation.

    "full" recomputes every layer by itself, unless Megatron's `--recompute-method` and `--recompute-num-layers` say
    otherwise; "selective" recomputes the modules of `--recompute-modules`, by default the core attention.

    Args:
        models: this rank's model chunks.

    Raises:
        ConfigError: modules are to be recomputed that cannot be switched.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        blocks = [module for module in modules if isinstance(module, TransformerBlock)]
        self._configs: list[Any] = list({id(block.config): block.config for block in blocks}.values())
        self._attentions = [module for module in modules if isinstance(module, Attention)]
        self._layers = [module for module in modules if isinstance(module, TransformerLayer)]
        self._mode: Recompute | None = None
        wanted = {name for config in self._configs for name in config.recompute_modules or ("core_attn",)}
        if fixed := wanted - set(RECOMPUTE_MODULES):
            raise ConfigError(
                f"expected --recompute-modules among {', '.join(RECOMPUTE_MODULES)}, got {', '.join(sorted(fixed))}: "
                "plans choose recomputation for each micro-batch, and these are fixed when the model is built"
            )
        self._attention = "core_attn" in wanted
        self._mlp = "mlp" in wanted

    def set(self, mode: Recompute) -> None:
        """Let the passes that follow keep, or compute again, what `mode` says."""
        if mode is self._mode:
            return
        self._mode = mode
        for config in self._configs:
            config.recompute_granularity = None if mode is Recompute.NONE else mode.value
            if mode is Recompute.FULL and config.recompute_method is None:
                config.recompute_method, config.recompute_num_layers = "uniform", 1
        selective = mode is Recompute.SELECTIVE
        for attention in self._attentions:
            attention.checkpoint_core_attention = selective and self._attention
        for layer in self._layers:
            layer.recompute_mlp = selective and self._mlp
