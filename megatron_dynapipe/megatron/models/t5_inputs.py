"""The inputs of a T5's stage of one micro-batch."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.data.segments import cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.megatron.models.padded_rows import AttentionRows, decoder_rows, encoder_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class T5StageInputs:
    """A stage's inputs of one micro-batch, other than boundary tensors: b rows, s input and t target positions.

    Masks are True where attention is forbidden. What a stage has no use for may be None; a packed row (b is 1) and the
    layers of Transformer Engine have no masks.

    Attributes:
        tokens: int64[b, s], where the encoder starts.
        decoder_tokens: int64[b, t], where the decoder starts.
        encoder_mask: bool[b, 1, s, s], with encoder layers.
        decoder_mask: bool[b, 1, t, t], causal and padding, with decoder layers.
        cross_mask: bool[b, 1, t, s], with decoder layers.
        encoder_row, decoder_row: where samples lie, of a packed row, and of all rows for the layers of Transformer
            Engine; the decoder's has that of cross-attention.
        labels: int64[b, t], on the last stage; without them it returns logits.
    """

    tokens: Tensor | None = None
    decoder_tokens: Tensor | None = None
    encoder_mask: Tensor | None = None
    decoder_mask: Tensor | None = None
    cross_mask: Tensor | None = None
    encoder_row: AttentionRows | None = None
    decoder_row: AttentionRows | None = None
    labels: Tensor | None = None


def padded_attention(shape: Shape, input_lengths: Tensor, decoder_lengths: Tensor, *, engine: bool) -> dict[str, Any]:
    """The arguments of attention over padded rows, by names in `T5StageInputs`: masks, or rows for Transformer Engine.

    Args:
        shape: the micro-batch's.
        input_lengths: int[b], positions of every input.
        decoder_lengths: int[b], of every target.
        engine: whether attention is Transformer Engine's.
    """
    inputs = shape.input_length
    targets = shape.target_length
    if engine:
        return {
            "encoder_row": encoder_rows(input_lengths, inputs),
            "decoder_row": decoder_rows(decoder_lengths, targets, input_lengths, inputs),
        }
    return {
        "encoder_mask": encoder_mask(input_lengths, inputs),
        "decoder_mask": decoder_mask(decoder_lengths, targets),
        "cross_mask": cross_mask(input_lengths, targets, inputs),
    }
