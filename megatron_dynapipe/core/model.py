"""A model as stacks of modules, and how they lie over a pipeline.

    T5, 3 + 4 layers     encoder  attention MLP attention MLP attention MLP      decoder  attention MLP … MLP      head
    cut over 4 stages    4 modules │ 4, the last two of the decoder │ 4 │ 2 and the head

A split is a number of modules for each virtual stage, in model order. People count layers, of two modules in most
models and of one in a HybridModel: `Model.modules_of` and `Model.layers_of` are where one becomes the other. A number
of layers may end in .5: that stage ends with the attention of its last layer, whose MLP the next one begins with.

Virtual stage v is chunk v // stages of pipeline stage v % stages.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dynapipe.core.costs import ATTENTION, EXPERT_MLP, HEAD, MLP, IntArray, Kind
from megatron_dynapipe.core.errors import ConfigError, PlanningError
from megatron_dynapipe.core.instructions import TensorShape
from megatron_dynapipe.core.units import ModelFamily, Shape

LayerSplit = tuple[int | float, ...]
"""Layers per virtual stage, in model order, as people write them; whole numbers are integers."""

ModuleSplit = tuple[int, ...]
"""Modules per virtual stage, in model order, without the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Stacks of modules.

    Attributes:
        encoder: kinds of the modules of the first stack, the only one of a decoder-only model.
        decoder: kinds of the second stack's modules, which read the first one's output; empty if there is none.
        modules_per_layer: modules that people count, and Megatron recomputes, as one layer.
    """

    encoder: tuple[Kind, ...]
    decoder: tuple[Kind, ...] = ()
    modules_per_layer: int = 2

    @property
    def modules(self) -> tuple[Kind, ...]:
        """The modules of all stacks in order; the head is the last."""
        return (*self.encoder, *self.decoder, HEAD)

    @property
    def family(self) -> ModelFamily:
        """The family by which plans and costs name such a model."""
        return ModelFamily.T5 if self.decoder else ModelFamily.GPT

    @property
    def layers(self) -> int:
        """Layers of all stacks."""
        return (len(self.encoder) + len(self.decoder)) // self.modules_per_layer

    @property
    def layers_divide(self) -> bool:
        """Whether a layer has several modules, between which a stage may end."""
        return self.modules_per_layer > 1

    @property
    def layers_with_experts(self) -> list[int]:
        """The layers whose MLPs have experts, if other layers' MLPs have none: they are a kind of their own."""
        return [at // self.modules_per_layer for at, kind in enumerate(self.encoder) if kind == EXPERT_MLP]

    def modules_of(self, split: Sequence[float]) -> ModuleSplit:
        """Modules per virtual stage from layers.

        Raises:
            ConfigError: a number of layers is not one of modules.
        """
        counts = [self.modules_per_layer * layers for layers in split]
        if any(count % 1 for count in counts):
            raise ConfigError(
                f"expected a layer split of {self.layers} layers in multiples of {1 / self.modules_per_layer:g},"
                f" got {list(split)}"
            )
        return tuple(map(int, counts))

    def layers_of(self, split: Sequence[int]) -> LayerSplit:
        """Layers per virtual stage from modules; whole numbers are integers."""
        size = self.modules_per_layer
        return tuple(count / size if count % size else count // size for count in split)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """A model cut over a pipeline.

    Attributes:
        model: what is cut.
        modules_per_stage: modules of each virtual stage, the head left out. A stage may hold both stacks' modules. With
            one stack, the embedding or the head may have a stage to itself.
        chunks: virtual stages per pipeline stage.

    Raises:
        ConfigError: a split that does not add up to the model, or has no modules where there must be some.
    """

    model: Model
    modules_per_stage: ModuleSplit
    chunks: int = 1

    def __post_init__(self) -> None:
        counts = self.modules_per_stage
        least = 1 if self.model.decoder else 0
        if not counts or min(counts) < least or sum(counts) != len(self.modules) - 1:
            split = self.model.layers_of(counts)
            raise ConfigError(
                f"expected a layer split of {self.model.layers} layers with at least"
                f" {least / self.model.modules_per_layer:g} on every stage, got {list(split)} of {sum(split)}"
            )
        if self.chunks < 1 or len(counts) % self.chunks:
            raise ConfigError(f"{len(counts)} virtual stages cannot be assigned to pipeline stages {self.chunks} each")

    @classmethod
    def of_layers(cls, model: Model, layers_per_stage: LayerSplit, chunks: int = 1) -> "PipelineLayout":
        """The model cut as people write it.

        Raises:
            ConfigError: numbers that are no split of the model's layers.
        """
        return cls(model=model, modules_per_stage=model.modules_of(layers_per_stage), chunks=chunks)

    @classmethod
    def equal(cls, model: Model, virtual: int, chunks: int = 1) -> "PipelineLayout":
        """The same number of layers on each of `virtual` stages.

        Raises:
            ConfigError: the number of layers is not a multiple of the number of virtual stages.
        """
        if model.layers % virtual:
            raise ConfigError(
                f"{model.layers} layers cannot be split equally over {virtual} stages",
                hint="use a layer split of auto, or a number of stages that divides the layers",
            )
        return cls.of_layers(model, (model.layers // virtual,) * virtual, chunks)

    @property
    def modules(self) -> tuple[Kind, ...]:
        """The model's modules in order; the head is the last."""
        return self.model.modules

    @property
    def layers_per_stage(self) -> LayerSplit:
        """The split as people write it."""
        return self.model.layers_of(self.modules_per_stage)

    @property
    def cuts(self) -> IntArray:
        """Modules before each boundary between virtual stages: int64[virtual stages - 1]."""
        return np.cumsum(self.modules_per_stage[:-1], dtype=np.int64)

    def over_labels(self, expert_kind: Kind | None, *, experts: bool) -> tuple[int, ...]:
        """The modules, in order, that run positions with labels alone where not all have one.

        They are the head and the MLP before it, unless that lies on an earlier stage.

        Args:
            expert_kind: the kind of MLPs with experts; None if there are none.
            experts: whether MLPs with experts do so, too; they may want all positions (`megatron.equip.experts`).
        """
        head, last = len(self.modules) - 1, self.modules[-2]
        joined = last in (MLP, EXPERT_MLP) and head not in self.cuts
        return (head - 1, head) if joined and (experts or last not in (EXPERT_MLP, expert_kind)) else (head,)

    def counts(self, kinds: Sequence[Kind]) -> IntArray:
        """Modules of each kind on every virtual stage: int64[virtual stages, kinds]."""
        modules = np.array([kinds.index(kind) for kind in self.modules])
        stages = np.searchsorted(self.cuts, np.arange(len(modules)), side="right")
        counts = np.zeros((self.virtual_stages, len(kinds)), np.int64)
        np.add.at(counts, (stages, modules), 1)
        return counts

    @property
    def virtual_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return len(self.modules_per_stage)

    @property
    def stages(self) -> int:
        """Pipeline stages, one per rank of the pipeline."""
        return self.virtual_stages // self.chunks

    @property
    def cuts_layers(self) -> bool:
        """Whether costs of a layer's attention and of its MLP are asked for apart."""
        if self.model.layers_divide:
            return any(count % self.model.modules_per_layer for count in self.modules_per_stage)
        return not {ATTENTION, MLP, EXPERT_MLP}.isdisjoint(self.modules)

    @property
    def decoder_state_forward(self) -> tuple[bool, ...]:
        """Per boundary v → v + 1, whether activations hold the decoder's state next to the encoder's output."""
        return tuple(cut > len(self.model.encoder) for cut in self.cuts.tolist())

    @property
    def decoder_state_backward(self) -> tuple[bool, ...]:
        """Per boundary v → v + 1, whether a cost model charges gradients of both states.

        By the published rule, a stage that begins in the decoder returns both, also where only the encoder's output
        was handed to it.
        """
        return tuple(cut >= len(self.model.encoder) for cut in self.cuts.tolist())


class BoundaryTensor(enum.StrEnum):
    """A hidden state that crosses a boundary."""

    ENCODER = "encoder"
    """[input length, size, hidden]; decoder-only models have only this one."""
    DECODER = "decoder"
    """[target length, size, hidden]"""


BoundaryTensors = tuple[tuple[BoundaryTensor, ...], ...]
"""Per boundary v → v + 1 between virtual stages, the tensors that cross it, in the order in which they are sent."""

BoundaryShapes = tuple[tuple[tuple[TensorShape, ...], ...], ...]
"""[micro-batch][boundary v → v + 1]: the shape of every tensor that crosses. Gradients cross back in equal shapes."""


def boundary_tensors(layout: PipelineLayout) -> BoundaryTensors:
    """The tensors at every boundary between virtual stages."""
    both = (BoundaryTensor.ENCODER, BoundaryTensor.DECODER)
    return tuple(both if decoder else both[:1] for decoder in layout.decoder_state_forward)


def boundary_shapes(
    tensors: BoundaryTensors, micro_batches: Sequence[Shape], *, hidden_size: int, sequence_parallel: int = 1
) -> BoundaryShapes:
    """The shapes at every boundary for every micro-batch.

    Args:
        tensors: at every boundary.
        micro_batches: their shapes.
        hidden_size: width of the states that cross.
        sequence_parallel: ranks over which the first dimension is sharded: the tensor-parallel size under sequence
            parallelism, else 1.

    Raises:
        PlanningError: a size below 1, or a length that is not divisible by the sequence-parallel size.
    """
    if hidden_size < 1 or sequence_parallel < 1:
        raise PlanningError(
            f"expected a hidden size and a sequence-parallel size of at least 1, got {hidden_size} and"
            f" {sequence_parallel}"
        )

    def of(shape: Shape) -> tuple[tuple[TensorShape, ...], ...]:
        rank_shape: dict[BoundaryTensor, TensorShape] = {}
        for tensor, length in zip(BoundaryTensor, (shape.input_length, shape.target_length), strict=True):
            if length % sequence_parallel:
                raise PlanningError(
                    f"expected the lengths of shape {shape} to be divisible by the sequence-parallel size "
                    f"{sequence_parallel}",
                    hint="use a tensor-parallel size that divides 8, or turn sequence parallelism off",
                )
            rank_shape[tensor] = (length // sequence_parallel, shape.size, hidden_size)
        return tuple(tuple(rank_shape[tensor] for tensor in crossing) for crossing in tensors)

    return tuple(of(shape) for shape in micro_batches)
