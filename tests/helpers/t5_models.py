"""Small T5s as values: what they are made of, and how their layers lie over stages."""

from collections.abc import Sequence

import torch

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import PipelineLayout, model_of_layers
from megatron_dynapipe.megatron.models.config import ModelConfig
from megatron_dynapipe.megatron.models.positions import Positions
from megatron_dynapipe.megatron.models.specs import CoreAttention


def t5_model(**changes: object) -> ModelConfig:
    """A T5 of local layers with learned positions; Megatron's own configuration is made by the test."""
    fields = {
        "stacks": model_of_layers(ModelFamily.T5, 2, 2),
        "hidden": 32,
        "heads": 4,
        "ffn": 128,
        "kv_channels": 8,
        "vocabulary": 512,
        "max_positions": 24,
        "longest": 24,
        "transformer_impl": "local",
        "attention": CoreAttention.SDPA,
        "positions": Positions(),
        "tied": True,
        "activation": None,
        "softmax_scale": None,
        "sequence_parallel": False,
        "fp32_residual": False,
        "dropout": False,
        "dtype": torch.float32,
        "gradient_dtype": torch.float32,
        "experts": None,
        "pattern": "",
        "arguments": None,
    }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def t5_layout(
    encoder: int, decoder: int, stages: int, split: Sequence[float] | None = None, *, chunks: int = 1
) -> PipelineLayout:
    """The layers of a T5 over `stages` ranks with `chunks` virtual stages each; the same number on each if None."""
    model = model_of_layers(ModelFamily.T5, encoder, decoder)
    if split is None:
        return PipelineLayout.equal(model, stages * chunks, chunks)
    return PipelineLayout.of_layers(model, tuple(split), chunks)
