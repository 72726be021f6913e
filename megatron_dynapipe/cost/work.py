"""What one layer of a transformer does and keeps: floating-point operations, memory traffic, messages, activations.

Everything is per micro-batch of b samples on one tensor-parallel rank, after "Reducing Activation Recomputation in
Large Transformer Models" (Korthikanti et al., 2022, section 4), generalised to any width of attention and feed-forward,
to cross-attention, grouped queries, gated networks, attention that keeps no scores, and experts.

A layer is two halves, and its work is their sum:

    norm → QKV → attention → projection → (a T5's decoder: the same again over the encoder's output)   attention
    norm → feed-forward network, or a router and experts                                              MLP
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.shape import ModelShape

Floats = npt.NDArray[np.float64]
_FP32_BYTES = 4


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

    def then(self, other: "Work") -> "Work":
        """Both parts, one after the other in a layer, of which full recomputation keeps the first one's input."""
        return Work(
            linear_flops=self.linear_flops + other.linear_flops,
            core_flops=self.core_flops + other.core_flops,
            shared_bytes=self.shared_bytes + other.shared_bytes,
            split_bytes=self.split_bytes + other.split_bytes,
            ffn_bytes=self.ffn_bytes + other.ffn_bytes,
            core_bytes=self.core_bytes + other.core_bytes,
            input_bytes=self.input_bytes,
            message_bytes=self.message_bytes + other.message_bytes,
            kernels=self.kernels + other.kernels,
        )


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
        return self.self_attention(b, q).then(self.feed_forward(b, q))

    def decoder(self, b: Floats, t: Floats, s: Floats) -> Work:
        """A decoder layer over t positions that attends to s positions of the encoder's output."""
        return self.decoder_attention(b, t, s).then(self.feed_forward(b, t))

    def self_attention(self, b: Floats, q: Floats) -> Work:
        """The attention half of an encoder layer, or a decoder-only one."""
        return self._attention(b, q, q, own_keys=True)

    def decoder_attention(self, b: Floats, t: Floats, s: Floats) -> Work:
        """The attention half of a decoder layer: over its own t positions, then over s of the encoder's output."""
        return self.self_attention(b, t).then(self._attention(b, t, s, own_keys=False))

    def _attention(self, b: Floats, q: Floats, k: Floats, *, own_keys: bool) -> Work:
        shape = self.shape
        h, a, g = shape.hidden, shape.query_channels, shape.key_value_channels
        queries, keys, pairs = b * q, b * k, b * q * k
        return self._work(
            linear=queries * 2 * h * a + keys * 2 * h * g,
            pairs=pairs,
            shared=queries * 2.5 * h,
            split=queries * 2 * a + keys * 2 * g,
            inputs=queries * h,
            messages=queries * h,
            kernels=0.6,
        )

    def feed_forward(self, b: Floats, q: Floats) -> Work:
        """The MLP half of a layer over q positions."""
        tokens, h, f = b * q, self.shape.hidden, self.shape.ffn
        return self._work(
            linear=tokens * 2 * h * self.shape.mlp_width,
            shared=tokens * 2.5 * h,
            ffn=tokens * (3 if self.shape.gated else 2) * f,
            inputs=tokens * h,
            messages=tokens * h,
            kernels=0.4,
        )

    def head(self, b: Floats, q: Floats) -> Work:
        """The output projection and the loss over q positions."""
        logits = b * q * self.shape.rows(self.tensor_parallel)
        return self._work(
            linear=logits * self.shape.hidden,
            split=3 * logits,
            messages=b * q * self.shape.hidden,
            kernels=0.75,
        )

    def head_memory(self, b: Floats, q: Floats) -> tuple[Floats, Floats]:
        """Bytes that the head and the loss keep for their backward, and the most that they hold, over q positions.

        Kept are the probabilities, in fp32. Beside them there are for a time the logits, or their gradient, in the
        model's own type where that is a narrower one, and the gradients of the weight and of the input.
        """
        rows = self.shape.rows(self.tensor_parallel) / self.tensor_parallel
        logits, weight = b * q * rows, rows * self.shape.hidden
        narrow = self.element_bytes if self.element_bytes < _FP32_BYTES else 0
        stored = logits * _FP32_BYTES
        return stored, stored + logits * narrow + (weight + b * q * self.shape.hidden) * self.element_bytes

    def _work(
        self,
        *,
        linear: Floats,
        messages: Floats,
        kernels: float,
        pairs: Floats | float = 0.0,
        shared: Floats | float = 0.0,
        split: Floats | float = 0.0,
        ffn: Floats | float = 0.0,
        inputs: Floats | float = 0.0,
    ) -> Work:
        """From counts over all ranks: multiplications, elements that every rank keeps, elements that they share."""
        tp, size, like = self.tensor_parallel, self.element_bytes, np.zeros_like(linear)
        shared_ranks = tp if self.sequence_parallel else 1
        return Work(
            linear_flops=2 * linear / tp,
            core_flops=like + 4 * pairs * self.shape.query_channels / tp,
            shared_bytes=like + shared / shared_ranks * size,
            split_bytes=like + (split + ffn) / tp * size,
            ffn_bytes=like + ffn / tp * size,
            core_bytes=like + 2.5 * pairs * self.shape.heads / tp * size,
            input_bytes=like + inputs / shared_ranks * size,
            message_bytes=messages * size * 2 * (tp - 1) / tp,  # as a ring all-reduce moves them
            kernels=kernels,
        )
