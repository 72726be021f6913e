"""Tiny T5s of one stage, ours and Megatron's, of the same weights and inputs."""

import argparse
from dataclasses import replace

import torch
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.data.segments import cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.megatron.models.specs import CoreAttention, t5_layer
from megatron_dynapipe.megatron.models.t5_inputs import T5StageInputs
from megatron_dynapipe.megatron.models.t5_stage import T5Stage
from tests.helpers.layouts.compare import relative_error
from tests.helpers.layouts.layout import Layout
from tests.helpers.layouts.model import config, draw_weights
from tests.helpers.t5_models import t5_args, t5_layout

VOCABULARY, MAX_LENGTH = 512, 24
"""Those of `t5_args`."""
SHAPES = (Shape(2, 8, 16), Shape(3, 16, 8), Shape(1, 24, 8))
ENCODER, DECODER = (Layout(family="t5", depth=depth) for depth in (5, 6))
"""Of 2 and 3 layers a stack."""


def options_of(positions: str, *, tied: bool = True, attention: str = "sdpa") -> argparse.Namespace:
    """Few buckets and a short distance, so that the samples reach all of them."""
    return t5_args(
        position_embedding_type=positions,
        rotary_percent=0.5,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        untie_embeddings_and_output_weights=not tied,
        dynapipe_attention=attention,
    )


def batch_of(shape: Shape, seed: int) -> T5StageInputs:
    """Random tokens; all samples but the first are shorter than the shape."""
    generator = torch.Generator().manual_seed(seed)
    size, length, target_length = shape

    def tokens(positions: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (size, positions), generator=generator)

    input_lengths = torch.tensor([length - i for i in range(size)])
    target_lengths = torch.tensor([target_length - 2 * i for i in range(size)])
    return T5StageInputs(
        tokens=tokens(length),
        decoder_tokens=tokens(target_length),
        encoder_mask=encoder_mask(input_lengths, length),
        decoder_mask=decoder_mask(target_lengths, target_length),
        cross_mask=cross_mask(input_lengths, target_length, length),
        labels=tokens(target_length),
    )


def check_against_megatrons(positions: str, tied: bool, attention: str) -> None:
    """Our one-stage T5 and Megatron's, with the same weights, have the same logits, losses and gradients."""
    options, (encoder, decoder) = options_of(positions, tied=tied, attention=attention), map(config, (ENCODER, DECODER))
    ours = T5Stage(encoder, args=options, layout=t5_layout(2, 3, 1), stage=0)
    draw_weights(ours)
    layers = {}
    for side, own in (("encoder", encoder), ("decoder", decoder)):
        layer, norm = t5_layer(encoder, CoreAttention(attention), decoder=side == "decoder")
        layers[f"transformer_{side}_layer_spec"] = TransformerBlockSubmodules([layer] * own.num_layers, layer_norm=norm)
    theirs = T5Model(
        config=decoder,
        encoder_config=encoder,
        **layers,
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_LENGTH,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
        rotary_percent=0.5,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    our_parameters = dict(ours.named_parameters())
    their_parameters = {name.replace("lm_head.", ""): p for name, p in theirs.named_parameters()}
    their_parameters.pop("position_embeddings.weight", None)
    assert our_parameters.keys() == their_parameters.keys()
    for name, parameter in their_parameters.items():
        parameter.data.copy_(our_parameters[name].data)
    for index, shape in enumerate(SHAPES):
        batch = batch_of(shape, index)
        masks = (batch.encoder_mask, batch.decoder_mask, batch.cross_mask)
        unlabelled = replace(batch, labels=None)
        real = ~batch.decoder_mask[:, 0, -1]  # what padding computes is nobody's
        their_logits = theirs(batch.tokens, batch.decoder_tokens, *masks)
        torch.testing.assert_close(ours(unlabelled)[real], their_logits[real], rtol=1e-5, atol=1e-5)
        their_loss = theirs(batch.tokens, batch.decoder_tokens, *masks, lm_labels=batch.labels)
        our_loss = ours(batch)
        assert our_loss.shape == (shape.size, shape.target_length)
        torch.testing.assert_close(our_loss[real], their_loss[real], rtol=1e-5, atol=1e-5)
        our_loss[real].sum().backward()
        their_loss[real].sum().backward()
    for name, parameter in their_parameters.items():
        error = relative_error(our_parameters[name].grad, parameter.grad)
        assert error < 1e-5, (name, error)
