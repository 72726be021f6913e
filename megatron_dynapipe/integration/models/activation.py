"""The activation of a model's layers where Megatron has no flag for it: GELU by its tanh form, as a gate or alone.

GPT-2 has it in its layers, T5 v1.1 in their gates. Megatron's `--openai-gelu` has no effect on megatron-core's models.
"""

from argparse import Namespace
from functools import partial

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from torch.nn.functional import gelu

from megatron_dynapipe.errors import ConfigError

FLAG = "--dynapipe-activation"


def model_config(args: Namespace, config: TransformerConfig | None = None) -> TransformerConfig:
    """Megatron's configuration of a model, with the activation that the flag names.

    To Megatron and to the planner, a model whose gates are GELU is one with `--swiglu`: its shapes are the same.

    Args:
        args: Megatron's arguments, with ours.
        config: what Megatron has made of them; made here if None.

    Raises:
        ConfigError: another flag names the activation, too.
    """
    config = config or core_transformer_config_from_args(args)
    if args.dynapipe_activation == "gelu_tanh":
        for name in ("squared_relu", "quick_geglu"):
            if getattr(args, name):
                other = f"--{name.replace('_', '-')}"
                raise ConfigError(f"expected {FLAG} or {other}, got both", hint="remove one of them")
        config.activation_func = partial(gelu, approximate="tanh")
        config.bias_activation_fusion = False  # Megatron's fused kernels have activations of their own
    return config
