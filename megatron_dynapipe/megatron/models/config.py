"""What Megatron's own configuration says of a run's model, and what a rank's memory of it follows from."""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.training.argument_utils import core_transformer_config_from_args
from torch import nn
from torch.nn.functional import gelu

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.models.eight_bits import length_multiple
from megatron_dynapipe.runtime.control_group import ControlGroup

GELU_TANH = "gelu_tanh"
"""An activation for which Megatron has no flag: GELU by its tanh form, alone as in GPT-2, or of gates as in T5 v1.1.
Megatron's `--openai-gelu` has no effect on megatron-core's models."""


def transformer_config(args: argparse.Namespace, of_loop: TransformerConfig | None = None) -> TransformerConfig:
    """Megatron's configuration, with the activation and the scale of scores that the run names.

    To Megatron and to the planner, a model whose gates are GELU is one with `--swiglu`: its shapes are the same.

    Args:
        args: Megatron's checked arguments.
        of_loop: what Megatron's loop has made; made here if None.

    Raises:
        ConfigError: Megatron has no such model.
    """
    try:
        config = of_loop or core_transformer_config_from_args(args)
    except (AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines() or ["it does not say why"]
        raise ConfigError(f"Megatron does not have the model that the flags describe: {reason[0]}") from error
    if args.dynapipe_activation == GELU_TANH:
        config.activation_func = partial(gelu, approximate="tanh")
        config.bias_activation_fusion = False  # Megatron's fused kernels have activations of their own
    if args.dynapipe_softmax_scale is not None:
        config.softmax_scale = args.dynapipe_softmax_scale
    return config


def state_dtype(config: TransformerConfig) -> torch.dtype:
    """Type of the states that cross stage boundaries."""
    dtype: torch.dtype = config.pipeline_dtype or config.params_dtype
    return torch.float32 if config.fp32_residual_connection else dtype


def expert_ranks(sizes: Any) -> int:
    """Neighbouring ranks of a stage that share experts, or tensor-parallel weights: whole replicas.

    Args:
        sizes: Megatron's arguments or configuration.
    """
    tensor: int = sizes.tensor_model_parallel_size
    return math.lcm(sizes.expert_model_parallel_size * (sizes.expert_tensor_parallel_size or tensor), tensor)


def planner_fields(config: TransformerConfig) -> dict[str, Any]:
    """The fields of `PlannerSettings` that a model's configuration decides, whichever host has made it."""
    in_step = expert_ranks(config) // config.tensor_model_parallel_size  # replicas that share experts; 1 for none
    return {
        "hidden_size": config.hidden_size,
        "tensor_parallel": config.tensor_model_parallel_size,
        "pipeline_parallel": config.pipeline_model_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "expert_parallel": in_step,
        "replicas_in_step": in_step,
        "element_bytes": state_dtype(config).itemsize,
        "length_multiple": length_multiple(config),
    }


def model_state_bytes(
    models: Sequence[nn.Module],
    config: TransformerConfig,
    control: ControlGroup,
    *,
    optimizer: str | None,
    gradients_in_fp32: bool,
    shards: int,
) -> tuple[int, ...]:
    """Memory of every pipeline rank's weights, gradients and optimizer states: the most of any replica's.

    Every rank calls it, and counts its real modules: embeddings where they lie, a weight that two modules share once.

    Args:
        models: this rank's chunks, wrapped or not.
        config: Megatron's.
        control: the group of all ranks.
        optimizer: Megatron's name of it, which says how many moments it has; None for models that do not train.
        gradients_in_fp32: whether gradients are added up in fp32, not in the type of parameters.
        shards: replicas that share the optimizer's states; 1 for none.
    """
    element = config.params_dtype.itemsize
    gradient = states = 0
    if optimizer is not None:
        gradient = 4 if gradients_in_fp32 else element
        states = 4 * ({"sgd": 1}.get(optimizer, 2) + (element < 4))  # half-precision parameters have a master copy
    modules = unwrap_model(list(models))
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    # Products read weights in eight bits forward and backward; embeddings, which have none, count as if they did.
    size = sum(p.numel() * (p.element_size() + 2 * bool(config.fp8)) for p in parameters)
    size += sum(b.numel() * b.element_size() for module in modules for b in module.buffers())
    trained = [p for p in parameters if p.requires_grad]
    of_experts = sum(p.numel() for p in trained if not getattr(p, "allreduce", True))  # Megatron's mark
    others = sum(p.numel() for p in trained) - of_experts
    expert_shards = max(shards * config.tensor_model_parallel_size // expert_ranks(config), 1)
    size += (others + of_experts) * gradient + -(-others * states // shards) + -(-of_experts * states // expert_shards)
    most = [0] * parallel_state.get_pipeline_model_parallel_world_size()
    own = torch.tensor([parallel_state.get_pipeline_model_parallel_rank(), size])
    for stage, counted in (values.tolist() for values in control.gather(own)):
        most[stage] = max(most[stage], counted)
    return tuple(most)
