"""Megatron's HybridModel, in which a layer is one module, of the layers that a GPT of this package has.

Layers keep the names of their weights, so that checkpoints load in Megatron's own HybridModel and back; Megatron loads
a GPT's checkpoint of the same layers.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

STACKS = (TransformerBlock, HybridStack)
"""Megatron's modules that run a stage's layers one after another."""
DECODER_ONLY = (GPTModel, HybridModel)


def final_norm(model: GPTModel | HybridModel) -> nn.Module | None:
    """The norm after the last layer; None on other stages."""
    stack = model.decoder
    norm: nn.Module | None = stack.final_norm if isinstance(stack, HybridStack) else stack.final_layernorm
    return norm


class PlannedHybridStack(HybridStack):
    """Megatron's stack with a final norm of this class: its own is Transformer Engine's alone."""

    def __init__(self, *arguments: object, norm: Any, post_layer_norm: bool = True, **keywords: object) -> None:
        super().__init__(*arguments, post_layer_norm=False, **keywords)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            config = self.config
            self.final_norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
