"""The parts of a model that are measured one by one, built as training builds them.

A part is a few layers of a stack one after another, the embedding, or the last norm, the head and the loss. Its
gradients are added to `main_grad` by hooks, as Megatron's data-parallel wrapper does: every backward pays for that.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_dynapipe.core.costs import LAYER_KINDS
from megatron_dynapipe.core.units import ModelFamily, Recompute, Shape, round_up
from megatron_dynapipe.costing import Experts, PipelineLayout, model_of_layers
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.data.segments import CutSegment, causal_mask
from megatron_dynapipe.megatron.equip.built import built_chunks, decoder_only
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.equip.told import Told
from megatron_dynapipe.megatron.execution.micro_batch_context import RecomputeSwitch
from megatron_dynapipe.megatron.execution.step_functions import takes_mask
from megatron_dynapipe.megatron.models import specs
from megatron_dynapipe.megatron.models.config import state_dtype, transformer_config
from megatron_dynapipe.megatron.models.eight_bits import length_multiple
from megatron_dynapipe.megatron.models.kept_keys import clear_kept_keys
from megatron_dynapipe.megatron.models.packed_rows import (
    DeviceSegments,
    attention_row,
    self_row,
)
from megatron_dynapipe.megatron.models.t5_inputs import T5StageInputs, padded_attention
from megatron_dynapipe.megatron.models.t5_stage import T5Stage
from megatron_dynapipe.megatron.profiling.adapters import check as check_adapters
from megatron_dynapipe.megatron.profiling.adapters import put_adapters
from megatron_dynapipe.megatron.profiling.recipe import Build, builder_of
from megatron_dynapipe.megatron.profiling.setup import ProfileSetup

Point = tuple[int, ...]
"""(size, length), or (size, input length, target length) for a decoder layer that attends to an encoder."""
Forward = Callable[[], Any]
"""Runs a pass, up to what its backward pass takes."""
Lengths = tuple[int, ...]
"""Positions of every sample of a packed row."""
Half = Literal["attention", "mlp"]
CHAINED_ON_CUDA = 4
"""Layers timed together on a GPU: of the time before its first kernel a quarter is counted into each."""


def run_backward(output: Tensor) -> None:
    """The backward pass of what a forward returned."""
    torch.autograd.backward(output, torch.ones_like(output))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModule:
    """Something to measure.

    Attributes:
        name: as in the cost model file: "encoder", "decoder", "expert", "postprocess".
        module: holds its parameters.
        prepare: makes the inputs of a point and returns its forward, which may be called repeatedly.
        prepare_row: likewise of a packed row, from its samples' inputs and targets; None for parts without attention.
        layers: that a forward runs one after another; what is measured is divided by it.
        alone: the same with one layer, where `layers` are more: for what several do not fit the device with.
        prepare_piece: as `prepare`, of a piece of (own positions, positions before); None where samples stay whole.
        embedding: that of the model, which is counted and not timed: it is small against a stage. None of layers.
        backward: takes what a forward returned.
    """

    name: str
    module: torch.nn.Module
    prepare: Callable[[Point], Forward]
    prepare_row: Callable[[Lengths, Lengths], Forward] | None = None
    layers: int = 1
    alone: "MeasuredModule | None" = None
    prepare_piece: Callable[[Point], Forward] | None = None
    embedding: torch.nn.Module | None = None
    backward: Callable[[Any], None] = run_backward

    @property
    def from_most_layers(self) -> "tuple[MeasuredModule, ...]":
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

    @property
    def trained_parameters(self) -> int:
        """Number of those in one layer that get gradients."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad) // self.layers

    @property
    def embedding_parameters(self) -> int:
        """Number of this rank's parameters in the embedding."""
        return sum(parameter.numel() for parameter in (self.embedding or torch.nn.Module()).parameters())

    @property
    def expert_parameters(self) -> int:
        """The number of experts' parameters, which ranks may share."""
        return sum(p.numel() for name, p in self.module.named_parameters() if ".experts." in name) // self.layers


def build_parts(
    setup: ProfileSetup,
    *,
    chained: int | None = None,
    adapters: Adapters | None = None,
    recipe: Path | None = None,
) -> Mapping[str, MeasuredModule]:
    """The parts of a model by name, in training mode on its device.

    `chained` layers are measured together; None takes `CHAINED_ON_CUDA` there, and one on a CPU, where no time passes
    before an operation. With `adapters`, all other weights are frozen. A `recipe` gives its own layers: as many as
    alternate, times a whole number.
    """
    if chained is None:
        chained = CHAINED_ON_CUDA if setup.device.type == "cuda" else 1
    if adapters is not None:
        check_adapters(setup.family)
    make = _Inputs(setup)
    alternating = 1
    if setup.family is ModelFamily.T5:
        build = partial(_t5_parts, setup.args, make)
    elif recipe is not None:
        layers, alternating = builder_of(recipe, tensor_parallel=setup.args.tensor_model_parallel_size)
        build = partial(_gpt_parts, setup.shape.experts, make, layers)
        chained = round_up(chained, alternating)
    else:
        build = partial(_gpt_parts, setup.shape.experts, make, _builder_of(setup.args))
    parts = {part.name: part for part in build(chained)}
    if chained > alternating:
        single = {part.name: part for part in build(alternating)}
        parts |= {name: replace(part, alone=single[name]) for name, part in parts.items() if part.layers > 1}
    for part in (part for chain in parts.values() for part in chain.from_most_layers):
        if adapters is not None:
            put_adapters(part.module, adapters, layers=part.name in LAYER_KINDS)
        part.module.to(device=setup.device, dtype=setup.dtype).train()
        accumulate_gradients(part.module, torch.float32 if setup.args.accumulate_allreduce_grads_in_fp32 else None)
    return parts


@contextmanager
def only(half: Half, part: MeasuredModule) -> Iterator[None]:
    """Leave one half of the part's layers inside the block, as on a stage that holds it alone.

    Its recompute mode is set before.
    """
    absent = specs.ATTENTION if half == "mlp" else {**specs.MLP, "is_moe_layer": bool, "recompute_mlp": bool}  # False
    modules = (module for chain in part.from_most_layers for module in chain.module.modules())
    layers = [module for module in modules if isinstance(module, TransformerLayer)]
    kept = [(layer, name, getattr(layer, name)) for layer in layers for name in absent]
    try:
        for layer, name, _ in kept:
            _put(layer, name, absent[name]())
        yield
    finally:
        for layer, name, value in kept:
            _put(layer, name, value)


def _put(layer: TransformerLayer, name: str, value: object) -> None:
    delattr(layer, name)  # a function takes a module's place
    setattr(layer, name, value)


def accumulate_gradients(module: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Add each gradient to a buffer, by default of its own type, and drop it, as Megatron's wrapper does.

    Linears that add it up themselves say so on the parameter, and hand autograd a stand-in.
    """

    def accumulate(parameter: Any) -> None:
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        parameter.grad_added_to_main_grad = False

    parameter: Any  # Megatron hangs a main_grad on it
    for parameter in module.parameters():
        if parameter.requires_grad and not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(accumulate)


def _t5_parts(args: argparse.Namespace, make: "_Inputs", chained: int) -> list[MeasuredModule]:
    """Stages of a T5: inner ones of three and three, with `chained` layers and nothing else, and the whole of 1 + 1."""
    config = transformer_config(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    inner = PipelineLayout.equal(model_of_layers(ModelFamily.T5, 3 * chained, 3 * chained), 6)
    whole = PipelineLayout.equal(model_of_layers(ModelFamily.T5, 1, 1), 1)
    build = partial(T5Stage, config, args=args, pg_collection=groups)
    encoder = build(layout=inner, stage=1)
    decoder = build(layout=inner, stage=4)
    for stage in (encoder, decoder):
        equip([stage])
    ends = build(layout=whole, stage=0)

    def encode(batch: T5StageInputs, length: int, size: int) -> Forward:
        state = make.state(length, size)

        def forward() -> Tensor:
            encoder.set_input_tensor([state])
            return torch.as_tensor(encoder(batch))

        return forward

    def decode(batch: T5StageInputs, encoded_length: int, length: int, size: int) -> Forward:
        state = make.state(length, size)
        encoded = make.state(encoded_length, size)

        def forward() -> Tensor:
            decoder.set_input_tensor([encoded, state])
            return torch.as_tensor(decoder(batch)[1])

        return forward

    def encode_row(inputs: Lengths, _targets: Lengths) -> Forward:
        row = make.row(inputs)
        return encode(T5StageInputs(encoder_row=self_row(row)), row.positions.size(1), 1)

    def decode_row(inputs: Lengths, targets: Lengths) -> Forward:
        keys = make.row(inputs)
        queries = make.row(targets)
        row = self_row(queries, attention_row(queries, keys))
        return decode(T5StageInputs(decoder_row=row), keys.positions.size(1), queries.positions.size(1), 1)

    def encode_padded(point: Point) -> Forward:
        size, length = point[0], make.padded_up(point[1])
        return encode(make.padded(Shape(size, length, 1)), length, size)

    def decode_padded(point: Point) -> Forward:
        size, encoded, length = point[0], *map(make.padded_up, point[1:])
        return decode(make.padded(Shape(size, encoded, length)), encoded, length, size)

    return [
        MeasuredModule(name="encoder", module=encoder, prepare=encode_padded, prepare_row=encode_row, layers=chained),
        MeasuredModule(name="decoder", module=decoder, prepare=decode_padded, prepare_row=decode_row, layers=chained),
        MeasuredModule(name="postprocess", module=_Head(ends), prepare=_head(ends, make), embedding=ends.embedding),
    ]


def _builder_of(args: argparse.Namespace) -> Build:
    """What builds layers as entry scripts do."""
    config = transformer_config(args)
    config.moe_router_force_load_balancing = config.num_moe_experts is not None  # as costs have it

    def build(layers: int, *, ends: bool = False, experts: bool = True) -> GPTModel:
        changed = copy.copy(config)  # each has its own switches of recomputation
        changed.num_layers = layers
        changed.moe_layer_freq = 1
        if not experts:
            changed.num_moe_experts = None
        built: GPTModel = built_chunks(decoder_only(args, config=changed), ends)[0]
        return built

    return build


def _gpt_parts(experts: Experts | None, make: "_Inputs", build: Build, chained: int) -> list[MeasuredModule]:
    """A GPT of `chained` layers of each kind without its ends, and its ends with a layer that is not run."""
    ends: Any = build(1, ends=True)
    chains = {}
    if experts is None or experts.layers:
        chains["encoder"] = build(chained, experts=False)
    if experts is not None:
        chains["expert" if experts.layers else "encoder"] = build(chained)
    return [
        *(_gpt_layers(kind, layers, chained, make) for kind, layers in chains.items()),
        MeasuredModule(name="postprocess", module=_Head(ends), prepare=_head(ends, make), embedding=ends.embedding),
    ]


def _gpt_layers(kind: str, layer: Any, chained: int, make: "_Inputs") -> MeasuredModule:
    tell = equip([layer]).tell
    explicit_mask = takes_mask([layer])

    def run_layer(point: Point) -> Forward:
        b, s = point[0], make.padded_up(point[1])
        state = make.state(s, b)
        positions = torch.arange(s, device=state.device).expand(b, -1)
        mask = causal_mask(s, state.device) if explicit_mask else None

        def forward() -> Tensor:
            tell()
            layer.set_input_tensor(state)
            return torch.as_tensor(layer(None, positions, mask))

        return forward

    def run_segments(segments: DeviceSegments) -> Forward:
        state = make.state(segments.positions.size(1), 1)
        told = Told(row=self_row(segments))

        def forward() -> Tensor:
            tell(told)
            layer.set_input_tensor(state)
            return torch.as_tensor(layer(None, segments.positions, None))

        return forward

    def run_piece(point: Point) -> Forward:
        piece, before = point
        clear_kept_keys([layer])
        if before:
            run_segments(make.row((before,), {0: CutSegment(0, 0, followed=True)}))()
        return run_segments(make.row((piece,), {0: CutSegment(0, before, followed=False)}))

    return MeasuredModule(
        name=kind,
        module=layer,
        prepare=run_layer,
        prepare_row=lambda inputs, _targets: run_segments(make.row(inputs)),
        layers=chained,
        prepare_piece=run_piece,
    )


def _head(model: Any, make: "_Inputs") -> Callable[[Point], Forward]:
    tied = model.share_embeddings_and_output_weights
    norm = model.decoder.final_layernorm

    def run(point: Point) -> Forward:
        b, s = point
        state = make.state(s, b)
        labels = make.tokens(b, s)

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


class _Inputs:
    """Random inputs of the shapes that layers take."""

    def __init__(self, setup: ProfileSetup) -> None:
        self._setup = setup
        self._device = setup.device
        self._dtype = state_dtype(transformer_config(setup.args))
        self._engine = specs.engine_attention(setup.args)
        self._multiple = length_multiple(setup.args)

    def padded_up(self, length: int) -> int:
        """The length of a micro-batch of so many positions."""
        return round_up(length, self._multiple)

    def state(self, length: int, size: int) -> Tensor:
        """[length, size, hidden] that a gradient is wanted of; this rank's part under sequence parallelism."""
        shape = (length // self._setup.shards, size, self._setup.shape.hidden)
        return torch.randn(shape, dtype=self._dtype, device=self._device).requires_grad_()

    def tokens(self, size: int, length: int) -> Tensor:
        """[size, length] of the vocabulary."""
        return torch.randint(self._setup.args.padded_vocab_size, (size, length), device=self._device)

    def row(self, lengths: Lengths, cuts: Mapping[int, CutSegment] | None = None) -> DeviceSegments:
        """`DeviceSegments.of` these lengths."""
        return DeviceSegments.of(lengths, self._device, cuts, multiple=self._multiple)

    def padded(self, shape: Shape) -> T5StageInputs:
        """The inputs of a stage's layers in training; rows are as long as can be, which costs the same as padding."""
        inputs, targets = (torch.full((shape.size,), length, device=self._device) for length in shape[1:])
        return T5StageInputs(**padded_attention(shape, inputs, targets, engine=self._engine))
