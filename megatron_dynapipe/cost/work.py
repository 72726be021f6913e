"""What one layer of a transformer does and keeps: floating-point operations, memory traffic, messages, activations.

Everything is per micro-batch of b samples on one tensor-parallel rank, after "Reducing Activation Recomputation in
Large Transformer Models" (Korthikanti et al., 2022, section 4), generalised to any width of attention and feed-forward
and to cross-attention.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.halves import LayerWidths
from megatron_dynapipe.cost.tables import LayerState
from megatron_dynapipe.units import ModelFamily

Floats = npt.NDArray[np.float64]
_FP32_BYTES = 4
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a transformer that decide its costs. `vocabulary` is padded as it is in memory."""

    family: ModelFamily
    hidden: _AtLeastOne
    heads: _AtLeastOne
    kv_channels: _AtLeastOne
    ffn: _AtLeastOne
    vocabulary: _AtLeastOne

    @property
    def widths(self) -> LayerWidths:
        """Of a layer."""
        return LayerWidths(hidden=self.hidden, attention=self.heads * self.kv_channels, ffn=self.ffn)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One part's forward of some micro-batches; arrays of one shape.

    Attributes:
        linear_flops: products with weights.
        core_flops: attention's products, which recompute mode "selective" repeats.
        shared_bytes: activations kept for the backward that every tensor-parallel rank holds (without sequence
            parallelism), and `split_bytes`: those of which each holds its part; both without attention's inside.
        ffn_bytes: those of `split_bytes` that lie in the feed-forward network.
        core_bytes: attention's inside: scores, softmax, dropout's mask.
        input_bytes: what full recomputation keeps.
        message_bytes: what tensor-parallel ranks add up over their links.
        kernels: launches, in units of those of an encoder layer.
    """

    linear_flops: Floats
    core_flops: Floats
    shared_bytes: Floats
    split_bytes: Floats
    ffn_bytes: Floats
    core_bytes: Floats
    input_bytes: Floats
    message_bytes: Floats
    kernels: float

    @property
    def kept_bytes(self) -> Floats:
        """What selective recomputation keeps."""
        return self.shared_bytes + self.split_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of a model's parts under one tensor parallelism.

    Attributes:
        shape: the model.
        tensor_parallel: ranks that share a layer.
        sequence_parallel: whether they share what lies between attention and feed-forward too.
        element_bytes: of a parameter or activation.
    """

    shape: ModelShape
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    element_bytes: int = 2

    def encoder(self, b: Floats, q: Floats) -> Work:
        """An encoder layer, or a decoder-only one, over q positions."""
        h, a, f = self._widths
        tokens, pairs = b * q, b * q * q
        return self._work(
            linear=tokens * (4 * h * a + 2 * h * f),
            pairs=pairs,
            shared=tokens * 5 * h,
            split=tokens * 4 * a,
            ffn=tokens * 2 * f,
            inputs=tokens * h,
            messages=2 * tokens * h,
            kernels=1.0,
        )

    def decoder(self, b: Floats, t: Floats, s: Floats) -> Work:
        """A decoder layer over t positions that attends to s positions of the encoder's output."""
        h, a, f = self._widths
        tokens, memory, pairs = b * t, b * s, b * t * (t + s)
        return self._work(
            linear=tokens * (6 * h * a + 2 * h * f) + memory * 2 * h * a,
            pairs=pairs,
            shared=tokens * 7.5 * h,
            split=tokens * 6 * a + memory * 2 * a,
            ffn=tokens * 2 * f,
            inputs=tokens * h,
            messages=3 * tokens * h,
            kernels=1.6,
        )

    def head(self, b: Floats, q: Floats) -> Work:
        """The output projection and the loss over q positions."""
        logits = b * q * self.shape.vocabulary
        nothing = np.zeros_like(logits)
        return self._work(
            linear=logits * self.shape.hidden,
            pairs=nothing,
            shared=nothing,
            split=3 * logits,
            ffn=nothing,
            inputs=nothing,
            messages=b * q * self.shape.hidden,
            kernels=0.75,
        )

    def head_memory(self, b: Floats, q: Floats) -> tuple[Floats, Floats]:
        """Bytes that the head and the loss keep for their backward, and the most that they hold, over q positions.

        Kept are the probabilities, in fp32. Beside them there are for a time the logits, or their gradient, in the
        model's own type where that is a narrower one, and the gradients of the weight and of the input.
        """
        logits = b * q * self.shape.vocabulary / self.tensor_parallel
        weight = self.shape.vocabulary * self.shape.hidden / self.tensor_parallel
        narrow = self.element_bytes if self.element_bytes < _FP32_BYTES else 0
        stored = logits * _FP32_BYTES
        return stored, stored + logits * narrow + (weight + b * q * self.shape.hidden) * self.element_bytes

    def state(self) -> LayerState:
        """Parameter bytes, counted as 2 bytes each, as the files do; norms and biases are left out."""
        h, a, f = self._widths
        encoder = (4 * h * a + 2 * h * f) // self.tensor_parallel
        decoder = (8 * h * a + 2 * h * f) // self.tensor_parallel
        return LayerState(
            embedding_bytes=2 * self.shape.vocabulary * h // self.tensor_parallel,
            encoder_bytes=2 * encoder,
            decoder_bytes=2 * decoder if self.shape.family is ModelFamily.T5 else 0,
        )

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.shape.hidden, self.shape.heads * self.shape.kv_channels, self.shape.ffn

    def _work(
        self,
        *,
        linear: Floats,
        pairs: Floats,
        shared: Floats,
        split: Floats,
        ffn: Floats,
        inputs: Floats,
        messages: Floats,
        kernels: float,
    ) -> Work:
        """From counts over all ranks: multiplications, elements that every rank keeps, elements that they share."""
        tp, size = self.tensor_parallel, self.element_bytes
        shared_ranks = tp if self.sequence_parallel else 1
        return Work(
            linear_flops=2 * linear / tp,
            core_flops=4 * pairs * self.shape.heads * self.shape.kv_channels / tp,
            shared_bytes=shared / shared_ranks * size,
            split_bytes=(split + ffn) / tp * size,
            ffn_bytes=ffn / tp * size,
            core_bytes=2.5 * pairs * self.shape.heads / tp * size,
            input_bytes=inputs / shared_ranks * size,
            message_bytes=messages * size * 2 * (tp - 1) / tp,  # as a ring all-reduce moves them
            kernels=kernels,
        )
