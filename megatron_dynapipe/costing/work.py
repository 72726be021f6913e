"""The work of one layer of a transformer: floating-point operations, memory traffic, messages, and activations kept.

Everything is per micro-batch of b samples on one tensor-parallel rank, after "Reducing Activation Recomputation in
Large Transformer Models" (Korthikanti et al., 2022, section 4), generalised to any width of attention and feed-forward,
to cross-attention, grouped queries, gated networks, attention that keeps no scores, and experts.

A layer is two halves, and its work is their sum:

    norm → QKV → attention → projection → (a T5's decoder: the same again over the encoder's output)   attention
    norm → feed-forward network, or a router and experts                                              MLP
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.costing.adapters import ATTENTION_LINEARS, DIVIDED_INPUTS, MLP_LINEARS, Linear
from megatron_dynapipe.costing.attention import Latent
from megatron_dynapipe.costing.shape import ModelShape

_FP32_BYTES = 4
_ADAPTER_KERNELS = {"lora": 0.07, "dora": 0.2}
"""Launches of an adapter, 4 and 11, in units of the 56 of an encoder layer's forward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """One part's forward of some micro-batches; arrays of one shape.

    Attributes:
        linear_flops: products with weights.
        frozen_flops: the part of `linear_flops` with frozen weights, which get no gradient.
        core_flops: attention's products, which recompute mode "selective" repeats.
        shared_bytes: activations kept for the backward that every tensor-parallel rank holds (without sequence
            parallelism), and `split_bytes`: the ones that each holds its part of; both without attention's inside.
        ffn_bytes: the part of `split_bytes` that lies in the feed-forward network.
        core_bytes: attention's inside: scores, softmax, dropout's mask.
        input_bytes: what full recomputation keeps.
        message_bytes: what tensor-parallel ranks add up over their links.
        kernels: launches, in units of an encoder layer's.
        norm_bytes: weights whose norms a forward computes.
        added_bytes: outputs that adapters add to frozen products, without keeping them.
    """

    linear_flops: Floats
    frozen_flops: Floats
    core_flops: Floats
    shared_bytes: Floats
    split_bytes: Floats
    ffn_bytes: Floats
    core_bytes: Floats
    input_bytes: Floats
    message_bytes: Floats
    kernels: float
    norm_bytes: float = 0.0
    added_bytes: Floats | float = 0.0

    @property
    def kept_bytes(self) -> Floats:
        """The activations that selective recomputation keeps."""
        return self.shared_bytes + self.split_bytes

    def then(self, other: "Workload") -> "Workload":
        """Both parts, one after the other in a layer; full recomputation keeps the first one's input."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Workload(**sums | {"input_bytes": self.input_bytes})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of a model's parts under one tensor parallelism.

    Attributes:
        shape: the model.
        tensor_parallel: ranks that share a layer.
        sequence_parallel: whether they share what lies between attention and feed-forward too.
        element_bytes: bytes of a parameter or activation.
    """

    shape: ModelShape
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    element_bytes: int = 2

    def encoder(self, b: Floats, q: Floats) -> Workload:
        """An encoder layer, or a decoder-only one, over q positions."""
        return self.self_attention(b, q).then(self.feed_forward(b, q))

    def decoder(self, b: Floats, t: Floats, s: Floats) -> Workload:
        """A decoder layer over t positions that attends to s positions of the encoder's output."""
        return self.decoder_attention(b, t, s).then(self.feed_forward(b, t))

    def self_attention(self, b: Floats, q: Floats) -> Workload:
        """The attention half of an encoder layer, or a decoder-only one."""
        shape = self.shape
        if shape.latent is not None:
            return self._adapted(self._latent_attention(b, q, shape.latent), b * q, ATTENTION_LINEARS)
        a, g = shape.query_channels, shape.key_value_channels
        copied = a if 1 < shape.query_groups < shape.heads and (shape.qk_norm or not shape.rotary) else 0
        turned = a + g if shape.rotary or shape.qk_norm else 0
        normed = a + g if shape.qk_norm and shape.rms_norm and not shape.fused else 0
        biased = bool(shape.relative_buckets) and not shape.fused
        attention = self._attention(b, q, q, more=b * q * (copied + turned + normed), biased=biased)
        return self._adapted(attention, b * q, ATTENTION_LINEARS)

    def decoder_attention(self, b: Floats, t: Floats, s: Floats) -> Workload:
        """The attention half of a decoder layer: over its own t positions, then over s of the encoder's output."""
        return self.self_attention(b, t).then(self._attention(b, t, s))

    def _latent_attention(self, b: Floats, q: Floats, latent: Latent) -> Workload:
        """Attention with compressions; sequence parallelism alone divides their work and what they keep."""
        shape, positions = self.shape, b * q
        h, o = shape.hidden, shape.attended_channels
        divided = 1 if self.sequence_parallel else self.tensor_parallel
        inside = shape.score_copies(biased=False) * positions * q * shape.heads
        return self._work(
            linear=positions * (latent.expanding(h, shape.heads) + o * h + latent.compressing(h) * divided),
            pairs=positions * shape.seen(q),
            inside=inside + positions * shape.heads * _FP32_BYTES / self.element_bytes * (not shape.keeps_scores),
            shared=positions
            * (
                (shape.norm_copies + 1 + shape.hidden_masks) * h + 2 * (latent.query_rank + latent.rank) + latent.rotary
            ),
            split=positions * 2 * (shape.query_channels + o),
            inputs=positions * h,
            messages=positions * h,
            kernels=0.7,
        )

    def _attention(
        self, b: Floats, q: Floats, k: Floats, *, more: Floats | float = 0.0, biased: bool = False
    ) -> Workload:
        """Attention of q positions to k, with `more` elements kept; `biased`: additive biases that no kernel takes."""
        shape = self.shape
        h, a, g = shape.hidden, shape.query_channels, shape.key_value_channels
        queries, keys, pairs = b * q, b * k, b * q * k
        scores = shape.score_copies(biased=biased)
        inside = scores * pairs * shape.heads
        if not shape.keeps_scores:  # scaled queries and keys, or the sum of every row of scores, in fp32
            inside = inside + (
                queries * a + keys * g if scores else queries * shape.heads * _FP32_BYTES / self.element_bytes
            )
        return self._work(
            linear=queries * 2 * h * a + keys * 2 * h * g,
            pairs=queries * shape.seen(k),
            inside=inside,
            shared=queries * (shape.norm_copies + 1 + shape.hidden_masks) * h,
            split=queries * 2 * a + keys * 2 * g + more,
            inputs=queries * h,
            messages=queries * h,
            kernels=0.6,
        )

    def feed_forward(self, b: Floats, q: Floats) -> Workload:
        """The MLP half of a layer over q positions; of experts, where each has as many tokens."""
        tokens, shape = b * q, self.shape
        h, kept, shared = shape.hidden, 2.0 if not shape.gated else 3.0 if shape.fused else 5.0, 0.0
        width = float(shape.ffn)
        if (experts := shape.experts) is not None:  # tokens are copied to their experts, and come back
            width = experts.per_token * experts.ffn + experts.shared_ffn
            shared = 2 * experts.per_token * h
        network = self._work(
            linear=tokens * 2 * h * shape.mlp_width,
            shared=tokens * ((shape.norm_copies + 1 + shape.hidden_masks) * h + shared),
            ffn=tokens * kept * width,
            inputs=tokens * h,
            messages=tokens * h,
            kernels=0.4,
        )
        return self._adapted(network, tokens, MLP_LINEARS)

    def _adapted(self, work: Workload, positions: Floats, linears: Sequence[Linear]) -> Workload:
        """Half a layer with adapters of some of its linears, whose inputs are kept for them; all else is frozen."""
        shape = self.shape
        adapters = self.shape.adapters
        if adapters is None:
            return work
        work = replace(work, frozen_flops=work.linear_flops)
        is_dora = adapters.kind == "dora"
        for linear in (linear for linear in linears if linear in adapters.linears):
            is_divided = linear in DIVIDED_INPUTS
            for inputs, outputs, times in shape.sizes_of(linear):
                each = times * positions
                # Inputs that sequence parallelism divides are gathered, and kept whole.
                whole = self.tensor_parallel * inputs if self.sequence_parallel and not is_divided else 0
                added = self._work(
                    linear=each * adapters.dim * (inputs + outputs),
                    shared=each * (adapters.dim + whole),
                    split=each * (adapters.dropout * inputs + is_dora * outputs),
                    messages=each * (adapters.dim + is_divided * outputs / 2),  # gathering is half an all-reduce
                    kernels=_ADAPTER_KERNELS[adapters.kind],
                )
                norms = is_dora * inputs * outputs / self.tensor_parallel * self.element_bytes
                outputs_bytes = each * outputs / self.tensor_parallel * self.element_bytes
                work = work.then(replace(added, norm_bytes=norms, added_bytes=outputs_bytes))
        return work

    def head(self, b: Floats, q: Floats) -> Workload:
        """The output projection and the loss over q positions."""
        logits = b * q * self.shape.rows(self.tensor_parallel)
        head = self._work(
            linear=logits * self.shape.hidden,
            split=3 * logits,
            messages=b * q * self.shape.hidden,
            kernels=0.75,
        )
        return head if self.shape.adapters is None else replace(head, frozen_flops=head.linear_flops)

    def head_memory(self, b: Floats, q: Floats) -> tuple[Floats, Floats]:
        """Bytes that the head and the loss keep for their backward, and the most that they hold, over q positions.

        Kept are the logits, in the model's own type, and the norm's output. For a time there are also the
        logits' gradient and the gradients of input and weight, unless that is frozen (`megatron.hooks.cross_entropy`).
        """
        rows = self.shape.rows(self.tensor_parallel) / self.tensor_parallel
        logits = b * q * rows
        weight = rows * self.shape.hidden * (self.shape.adapters is None)
        shared_ranks = self.tensor_parallel if self.sequence_parallel else 1
        normed = b * q * self.shape.hidden * self.shape.norm_copies / shared_ranks
        stored = (logits + normed) * self.element_bytes
        return stored, stored + (logits + weight + b * q * self.shape.hidden) * self.element_bytes

    def _work(
        self,
        *,
        linear: Floats,
        messages: Floats,
        kernels: float,
        pairs: Floats | float = 0.0,
        inside: Floats | float = 0.0,
        shared: Floats | float = 0.0,
        split: Floats | float = 0.0,
        ffn: Floats | float = 0.0,
        inputs: Floats | float = 0.0,
    ) -> Workload:
        """From counts over all ranks: multiplications, elements that every rank keeps, elements that they share."""
        tp, size, like = self.tensor_parallel, self.element_bytes, np.zeros_like(linear)
        shared_ranks = tp if self.sequence_parallel else 1
        return Workload(
            linear_flops=2 * linear / tp,
            frozen_flops=like,
            core_flops=like + 2 * pairs * (self.shape.query_channels + self.shape.attended_channels) / tp,
            shared_bytes=like + shared / shared_ranks * size,
            split_bytes=like + (split + ffn) / tp * size,
            ffn_bytes=like + ffn / tp * size,
            core_bytes=like + inside / tp * size,
            input_bytes=like + inputs / shared_ranks * size,
            message_bytes=messages * size * 2 * (tp - 1) / tp,  # as a ring all-reduce moves them
            kernels=kernels,
        )
