"""The parts of a model that are measured one by one, built as training builds them.

A part is a few layers of a stack one after another, the embedding, or the last norm, the head and the loss. Its
gradients are added to `main_grad` by hooks, as Megatron's data-parallel wrapper does: every backward pays for that.
"""

import copy
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dynapipe.data.masks import causal_mask, cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.integration.execution.micro_batch_context import RecomputeSwitch
from megatron_dynapipe.integration.flags.plan_inputs import state_dtype
from megatron_dynapipe.integration.models.activation import model_config
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.integration.models.packed_rows import (
    DeviceSegments,
    RowFormat,
    attention_row,
    rotate_by_sample,
    self_row,
)
from megatron_dynapipe.integration.models.padded_rows import decoder_rows, encoder_rows
from megatron_dynapipe.integration.models.providers import gpt_provider, gpt_takes_mask, t5_options
from megatron_dynapipe.integration.models.t5_stage import T5Stage, T5StageInputs
from megatron_dynapipe.units import ModelFamily, Recompute, round_up

Point = tuple[int, ...]
"""(size, length), or (size, input length, target length) for a decoder layer that attends to an encoder."""
Forward = Callable[[], Tensor]
Lengths = tuple[int, ...]
"""Positions of every sample of a packed row."""
CHAINED_ON_CUDA = 4
"""Layers timed together on a GPU: of the time before its first kernel a quarter is counted into each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something to measure.

    Attributes:
        name: as in the cost model file: "encoder", "decoder", "postprocess", "embedding".
        module: holds its parameters.
        prepare: makes the inputs of a point and returns its forward, which may be called repeatedly.
        prepare_row: likewise of a packed row, from its samples' inputs and targets; None for parts without attention.
        layers: that a forward runs one after another; what is measured is divided by it.
        alone: the same with one layer, where `layers` are more: for what several do not fit the device with.
    """

    name: str
    module: torch.nn.Module
    prepare: Callable[[Point], Forward]
    prepare_row: Callable[[Lengths, Lengths], Forward] | None = None
    layers: int = 1
    alone: "Part | None" = None

    @property
    def from_most_layers(self) -> "tuple[Part, ...]":
        """The part, and the one with a single layer where there is one."""
        return (self,) if self.alone is None else (self, self.alone)

    def set_recompute(self, mode: Recompute) -> None:
        """Let the next passes keep or recompute what `mode` says."""
        for part in self.from_most_layers:
            RecomputeSwitch([part.module]).set(mode)

    @property
    def parameters(self) -> int:
        """Number of this rank's parameters in one layer."""
        return sum(parameter.numel() for parameter in self.module.parameters()) // self.layers


def build_parts(
    args: Namespace, family: ModelFamily, device: torch.device, *, chained: int | None = None
) -> Mapping[str, Part]:
    """The parts of the model that Megatron's arguments describe, by name, in training mode on `device`.

    Args:
        args: Megatron's.
        family: kind of model.
        device: where they are measured.
        chained: layers that are measured together; None takes `CHAINED_ON_CUDA` there, and one on a CPU, where no time
            passes before an operation.
    """
    if chained is None:
        chained = CHAINED_ON_CUDA if device.type == "cuda" else 1
    config = model_config(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    build = _t5_parts if family is ModelFamily.T5 else _gpt_parts
    parts = {part.name: part for part in build(args, config, groups, chained)}
    if chained > 1:
        single = {part.name: part for part in build(args, config, groups, 1)}
        parts |= {name: replace(part, alone=single[name]) for name, part in parts.items() if part.layers > 1}
    for part in (each for chain in parts.values() for each in chain.from_most_layers):
        part.module.to(device=device, dtype=args.params_dtype).train()
        accumulate_gradients(part.module, gradient_dtype(args))
    return parts


def gradient_dtype(args: Namespace) -> torch.dtype:
    """Type of the buffer that training adds gradients up in: fp32 in bf16 training too, if not asked otherwise."""
    dtype: torch.dtype = args.params_dtype
    return torch.float32 if args.accumulate_allreduce_grads_in_fp32 else dtype


def accumulate_gradients(module: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Add each gradient to a buffer as soon as it is there, and drop it, as Megatron's wrapper does.

    Args:
        module: whose parameters get buffers.
        dtype: of the buffers; the parameters' if None.
    """

    def accumulate(parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    parameter: Any  # Megatron hangs a main_grad on it
    for parameter in module.parameters():
        if not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            parameter.register_post_accumulate_grad_hook(accumulate)


def _t5_parts(args: Namespace, config: TransformerConfig, groups: ProcessGroupCollection, chained: int) -> list[Part]:
    """Stages of a T5: inner ones of three and three, with `chained` layers and nothing else, and the whole of 1 + 1."""
    inner, whole = T5Split.of(3 * chained, 3 * chained, 6), T5Split.of(1, 1, 1)
    build = partial(
        T5Stage,
        config,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        options=t5_options(args),
        pg_collection=groups,
    )
    encoder, decoder, ends = build(split=inner, stage=1), build(split=inner, stage=4), build(split=whole, stage=0)
    make = _Inputs(args, next(encoder.parameters()))

    def run_encoder(point: Point) -> Forward:
        b, s = point
        state = make.state(s, b)
        batch = make.encoder_batch(b, s)

        def forward() -> Tensor:
            encoder.set_input_tensor([state])
            return torch.as_tensor(encoder(batch))

        return forward

    def run_decoder(point: Point) -> Forward:
        b, s, t = point
        state, encoded = make.state(t, b), make.state(s, b)
        batch = make.decoder_batch(b, s, t)

        def forward() -> Tensor:
            decoder.set_input_tensor([encoded, state])
            return torch.as_tensor(decoder(batch)[1])

        return forward

    return [
        Part(
            name="encoder",
            module=encoder,
            prepare=run_encoder,
            prepare_row=_encoder_row(encoder, make),
            layers=chained,
        ),
        Part(
            name="decoder",
            module=decoder,
            prepare=run_decoder,
            prepare_row=_decoder_row(decoder, make),
            layers=chained,
        ),
        Part(name="postprocess", module=_Head(ends), prepare=_head(ends, make)),
        Part(name="embedding", module=ends.embedding, prepare=_embedding(ends.embedding, make)),
    ]


def _encoder_row(encoder: T5Stage, make: "_Inputs") -> Callable[[Lengths, Lengths], Forward]:
    def run(inputs: Lengths, _targets: Lengths) -> Forward:
        row = make.row(inputs)
        state, batch = make.state(row.positions.size(1), 1), T5StageInputs(encoder_row=self_row(row, make.row_format))

        def forward() -> Tensor:
            encoder.set_input_tensor([state])
            return torch.as_tensor(encoder(batch))

        return forward

    return run


def _decoder_row(decoder: T5Stage, make: "_Inputs") -> Callable[[Lengths, Lengths], Forward]:
    def run(inputs: Lengths, targets: Lengths) -> Forward:
        keys, queries = make.row(inputs), make.row(targets)
        state, encoded = make.state(queries.positions.size(1), 1), make.state(keys.positions.size(1), 1)
        cross = attention_row(queries, keys, make.row_format)
        batch = T5StageInputs(decoder_row=self_row(queries, make.row_format, cross))

        def forward() -> Tensor:
            decoder.set_input_tensor([encoded, state])
            return torch.as_tensor(decoder(batch)[1])

        return forward

    return run


def _gpt_parts(args: Namespace, config: TransformerConfig, groups: ProcessGroupCollection, chained: int) -> list[Part]:
    """A GPT of `chained` layers without its ends, and its ends with a layer that is not run."""
    provide = partial(gpt_provider(args), pg_collection=groups)
    layer: GPTModel = provide(config=_of_layers(config, chained), pre_process=False, post_process=False)
    ends: GPTModel = provide(config=_of_layers(config, 1))
    make = _Inputs(args, next(layer.parameters()))
    rotate_by_sample([layer])

    def run_layer(point: Point) -> Forward:
        b, s = point
        state = make.state(s, b)
        positions = torch.arange(s, device=state.device).expand(b, -1)
        mask = causal_mask(s, state.device) if gpt_takes_mask(args) else None

        def forward() -> Tensor:
            layer.set_input_tensor(state)
            return torch.as_tensor(layer(None, positions, mask))

        return forward

    def run_row(inputs: Lengths, _targets: Lengths) -> Forward:
        segments = make.row(inputs)
        state, row = make.state(segments.positions.size(1), 1), self_row(segments, make.row_format)

        def forward() -> Tensor:
            layer.set_input_tensor(state)
            return torch.as_tensor(layer(None, segments.positions, None, packed_seq_params=row))

        return forward

    return [
        Part(name="encoder", module=layer, prepare=run_layer, prepare_row=run_row, layers=chained),
        Part(name="postprocess", module=_Head(ends), prepare=_head(ends, make)),
        Part(name="embedding", module=ends.embedding, prepare=_embedding(ends.embedding, make)),
    ]


def _of_layers(config: TransformerConfig, layers: int) -> TransformerConfig:
    """The configuration of a model of so many layers; each has its own switches of recomputation."""
    own = copy.copy(config)
    own.num_layers = layers
    return own


def _head(model: Any, make: "_Inputs") -> Callable[[Point], Forward]:
    tied, norm = model.share_embeddings_and_output_weights, model.decoder.final_layernorm

    def run(point: Point) -> Forward:
        b, s = point
        state, labels = make.state(s, b), make.tokens(b, s)

        def forward() -> Tensor:
            normed = state if norm is None else norm(state)
            logits, _ = model.output_layer(normed, weight=model.shared_embedding_or_output_weight() if tied else None)
            return torch.as_tensor(model.compute_language_model_loss(labels, logits)).float().sum()

        return forward

    return run


class _Head(torch.nn.Module):
    """The last norm and the output layer with the weight it uses, which may be the embedding's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.final_layernorm = model.decoder.final_layernorm
        self.output_layer = model.output_layer
        if model.share_embeddings_and_output_weights:
            self.weight = model.shared_embedding_or_output_weight()


def _embedding(embedding: torch.nn.Module, make: "_Inputs") -> Callable[[Point], Forward]:
    def run(point: Point) -> Forward:
        b, s = point
        tokens = make.tokens(b, s)
        positions = torch.arange(s, device=tokens.device).expand_as(tokens)
        return lambda: torch.as_tensor(embedding(input_ids=tokens, position_ids=positions))

    return run


class _Inputs:
    """Random inputs of the shapes that layers take, beside a parameter, whose device they share."""

    def __init__(self, args: Namespace, beside: Tensor) -> None:
        self._args = args
        self._beside = beside
        self.row_format = RowFormat.of(args)

    def state(self, length: int, size: int) -> Tensor:
        """[length, size, hidden] that a gradient is wanted of; this rank's part under sequence parallelism."""
        ways = self._args.tensor_model_parallel_size if self._args.sequence_parallel else 1
        shape = (length // ways, size, self._args.hidden_size)
        return torch.randn(shape, dtype=state_dtype(self._args), device=self._beside.device).requires_grad_()

    def tokens(self, size: int, length: int) -> Tensor:
        """[size, length] of the vocabulary."""
        return torch.randint(self._args.padded_vocab_size, (size, length), device=self._beside.device)

    def row(self, lengths: Lengths) -> DeviceSegments:
        """The segments of samples of these positions, and of the row's tail."""
        starts = tuple(accumulate(lengths, initial=0))
        host = RowSegments.of(starts, round_up(starts[-1]))
        device = self._beside.device
        return DeviceSegments(host=host, offsets=host.offsets.to(device), positions=host.positions.to(device))

    def encoder_batch(self, b: int, s: int) -> T5StageInputs:
        """What a stage of encoder layers takes, in the form of training."""
        lengths = self._lengths(b, s)
        if self.row_format is RowFormat.TRANSFORMER_ENGINE:
            return T5StageInputs(encoder_row=encoder_rows(lengths, s))
        return T5StageInputs(encoder_mask=encoder_mask(lengths, s))

    def decoder_batch(self, b: int, s: int, t: int) -> T5StageInputs:
        """What a stage of decoder layers takes, in the form of training."""
        inputs, targets = self._lengths(b, s), self._lengths(b, t)
        if self.row_format is RowFormat.TRANSFORMER_ENGINE:
            return T5StageInputs(decoder_row=decoder_rows(targets, t, inputs, s))
        return T5StageInputs(decoder_mask=decoder_mask(targets, t), cross_mask=cross_mask(inputs, t, s))

    def _lengths(self, size: int, length: int) -> Tensor:
        """[size]: no padding, which costs the same."""
        return torch.full((size,), length, device=self._beside.device)
