"""Small T5s as values: what they are made of, and how their layers lie over stages."""

import argparse
from collections.abc import Sequence

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import PipelineLayout, model_of_layers


def t5_args(**changes: object) -> argparse.Namespace:
    """Megatron's arguments of a T5 with learned positions; its own configuration is made by the test."""
    fields = {
        "padded_vocab_size": 512,
        "max_position_embeddings": 24,
        "transformer_impl": "local",
        "use_dynapipe": False,
        "dynapipe_attention": "sdpa",
        "position_embedding_type": "learned_absolute",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "rotary_seq_len_interpolation_factor": None,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "untie_embeddings_and_output_weights": False,
    }
    return argparse.Namespace(**(fields | changes))


def t5_layout(
    encoder: int, decoder: int, stages: int, split: Sequence[float] | None = None, *, chunks: int = 1
) -> PipelineLayout:
    """The layers of a T5 over `stages` ranks with `chunks` virtual stages each; the same number on each if None."""
    model = model_of_layers(ModelFamily.T5, encoder, decoder)
    if split is None:
        return PipelineLayout.equal(model, stages * chunks, chunks)
    return PipelineLayout.of_layers(model, tuple(split), chunks)
