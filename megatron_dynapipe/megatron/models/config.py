"""A run's model as one value, which providers, the profiler and plans read in place of Megatron's namespace."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from torch.nn.functional import gelu

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import Experts, Model
from megatron_dynapipe.megatron.models.positions import RELATIVE, Positions
from megatron_dynapipe.megatron.models.specs import CoreAttention

GELU_TANH = "gelu_tanh"
"""An activation for which Megatron has no flag: GELU by its tanh form, alone as in GPT-2, or of gates as in T5 v1.1.
Megatron's `--openai-gelu` has no effect on megatron-core's models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model, and how its layers are computed.

    Attributes:
        stacks: modules, as plans count them.
        hidden, heads, kv_channels, ffn: sizes of a layer.
        vocabulary: tokens, padded; 0 until Megatron knows them.
        max_positions: positions that can be embedded.
        longest: positions of the longest sequence of either stack.
        transformer_impl: Megatron's name of the kind of layers.
        attention: the core attention of the layers.
        positions: how layers come to know positions.
        tied: whether the head's weight is the word embeddings'.
        activation: `GELU_TANH`, or None for Megatron's own.
        softmax_scale: factor of attention's scores; None for Megatron's own, 1 / √(head size).
        sequence_parallel: whether states between layers are sharded over the tensor-parallel ranks.
        fp32_residual: whether states between layers are of fp32.
        dtype: the type of parameters.
        gradient_dtype: the type of the buffer that gradients are added up in.
        dropout: whether anything is dropped.
        pattern: a HybridModel's modules, without stages; empty for other models.
        experts: in place of a GPT's feed-forward networks; None for none.
        arguments: the namespace, from which Megatron makes its own configuration.
    """

    stacks: Model
    hidden: int
    heads: int
    kv_channels: int
    ffn: int
    vocabulary: int
    max_positions: int
    longest: int
    transformer_impl: str
    attention: CoreAttention
    positions: Positions
    tied: bool
    activation: str | None
    softmax_scale: float | None
    sequence_parallel: bool
    fp32_residual: bool
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    dropout: bool
    pattern: str
    experts: Experts | None
    arguments: argparse.Namespace

    @property
    def family(self) -> ModelFamily:
        """Kind of model."""
        return self.stacks.family

    @property
    def transformer_engine(self) -> bool:
        """Whether layers are Transformer Engine's, instead of Megatron's local ones."""
        return self.transformer_impl != "local"

    @property
    def engine_attention(self) -> bool:
        """Whether attention is Transformer Engine's."""
        return self.transformer_engine and self.attention is CoreAttention.MEGATRON

    @property
    def biases_hide(self) -> bool:
        """Whether relative biases say which keys are forbidden; Transformer Engine's kernels are told otherwise."""
        return self.positions.kind == RELATIVE and not self.engine_attention

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of the states that cross stage boundaries: that of Megatron's `pipeline_dtype`."""
        return torch.float32 if self.fp32_residual else self.dtype

    def transformer_config(self, of_loop: TransformerConfig | None = None) -> TransformerConfig:
        """Megatron's configuration, with the activation and the scale of scores that the run names.

        To Megatron and to the planner, a model whose gates are GELU is one with `--swiglu`: its shapes are the same.

        Args:
            of_loop: what Megatron's loop has made; made here if None.
        """
        config = of_loop or megatron_config(self.arguments)
        if self.activation == GELU_TANH:
            config.activation_func = partial(gelu, approximate="tanh")
            config.bias_activation_fusion = False  # Megatron's fused kernels have activations of their own
        if self.softmax_scale is not None:
            config.softmax_scale = self.softmax_scale
        return config


def megatron_config(args: argparse.Namespace) -> TransformerConfig:
    """Megatron's configuration of its arguments; raises ConfigError where it has no such model."""
    try:
        return core_transformer_config_from_args(args)
    except (AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines() or ["it does not say why"]
        raise ConfigError(f"Megatron does not have the model that the flags describe: {reason[0]}") from error


def expert_ranks(sizes: Any) -> int:
    """Neighbouring ranks of a stage that share experts, or tensor-parallel weights: whole replicas.

    Args:
        sizes: Megatron's arguments or configuration.
    """
    tensor: int = sizes.tensor_model_parallel_size
    return math.lcm(sizes.expert_model_parallel_size * (sizes.expert_tensor_parallel_size or tensor), tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter's copies on a rank.

    Attributes:
        gradient: in the buffer that gradients are added up in.
        optimizer: master copy and moments.
        optimizer_shards: ranks that share the optimizer's states.
        expert_shards: ranks that share the experts' parameters.
        quantised: in eight bits, as products read it forward and backward; as many of embeddings, which have none.
    """

    gradient: int
    optimizer: int
    optimizer_shards: int = 1
    expert_shards: int = 1
    quantised: int = 0

    def total(self, modules: Sequence[torch.nn.Module]) -> int:
        """Parameters, gradients and optimizer states of a rank's modules, and their buffers.

        Counted from the real modules: embeddings where they lie, a weight that two modules share once.
        """
        parameters = {id(p): p for module in modules for p in module.parameters()}.values()
        kept = sum(p.numel() * (p.element_size() + self.quantised) for p in parameters)
        kept += sum(b.numel() * b.element_size() for module in modules for b in module.buffers())
        trained = [p for p in parameters if p.requires_grad]
        of_experts = sum(p.numel() for p in trained if not getattr(p, "allreduce", True))  # Megatron's mark
        others = sum(p.numel() for p in trained) - of_experts
        states = -(-others * self.optimizer // self.optimizer_shards)
        return (
            kept
            + (others + of_experts) * self.gradient
            + states
            + -(-of_experts * self.optimizer // self.expert_shards)
        )
