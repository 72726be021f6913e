"""How a model's layers lie over a pipeline: the one owner of "layers per stage".

    T5, 3 + 4 layers on 4 stages      encoder 0 1 │ encoder 2 decoder 0 │ decoder 1 2 │ decoder 3 head
    layers_per_stage                       2               2                  2             1

A layer is two modules, and a split a list of cuts between modules. A number may end in .5: that stage ends with the
attention of its last layer, whose MLP the next one begins with.

    GPT, 3 layers, 1.5 each      attention 0  MLP 0  attention 1 │ MLP 1  attention 2  MLP 2  head      cut at 3 of 7

Virtual stage v is chunk v // stages of pipeline stage v % stages.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dynapipe.core.costs import (
    ATTENTION,
    DECODER_ATTENTION,
    DECODER_MLP,
    EXPERT_MLP,
    HEAD,
    MLP,
    IntArray,
    Kind,
)
from megatron_dynapipe.core.errors import ConfigError, PlanningError
from megatron_dynapipe.core.instructions import TensorShape
from megatron_dynapipe.core.units import ModelFamily, Shape

Split = tuple[int | float, ...]
"""Layers per virtual stage, in model order: multiples of 0.5, whole ones as integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Layers per virtual stage in model order (T5: encoder layers, then decoder layers).

    Attributes:
        family: "gpt" layers all count as encoder layers.
        encoder_layers, decoder_layers: of the whole model.
        layers_per_stage: one number per virtual stage, a multiple of 0.5: above 0 for a T5, while a GPT's embedding
            or head may have a stage to itself. A stage may hold both kinds of layer.
        chunks: virtual stages per pipeline stage.
        expert_layers: of a GPT, those with experts where others have none.
        pattern: kinds of the modules of a model that is not made of layers of two: these are then its layers, of which
            each is one module. Empty for others.

    Raises:
        ConfigError: layers not of the family's kinds, or a split that does not add up to them.
    """

    family: ModelFamily
    encoder_layers: int
    decoder_layers: int = 0
    layers_per_stage: Split
    chunks: int = 1
    expert_layers: tuple[int, ...] = ()
    pattern: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        if self.encoder_layers < 1 or (self.decoder_layers < 1) == (self.family is ModelFamily.T5):
            raise ConfigError(
                f"expected a {self.family} model with layers of its kinds, got {self.encoder_layers} encoder and"
                f" {self.decoder_layers} decoder layers"
            )
        layers, split = self.encoder_layers + self.decoder_layers, self.layers_per_stage
        least = 0.5 if self.family is ModelFamily.T5 else 0
        if not split or min(split) < least or sum(split) != layers or any(number % 0.5 for number in split):
            raise ConfigError(
                f"expected a layer split of {layers} layers in multiples of 0.5 with at least {least} on every stage,"
                f" got {list(split)} of {sum(split)}"
            )
        if self.chunks < 1 or len(split) % self.chunks:
            raise ConfigError(f"{len(split)} virtual stages cannot be assigned to pipeline stages {self.chunks} each")

    @classmethod
    def equal(
        cls, family: ModelFamily, encoder_layers: int, decoder_layers: int, virtual: int, chunks: int = 1
    ) -> "PipelineLayout":
        """The same number of layers on each of `virtual` stages.

        Raises:
            ConfigError: the number of layers is not a multiple of the number of virtual stages.
        """
        layers = encoder_layers + decoder_layers
        if layers % virtual:
            raise ConfigError(
                f"{layers} layers cannot be split equally over {virtual} stages",
                hint="use a layer split of auto, or a number of stages that divides the layers",
            )
        return cls(
            family=family,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            layers_per_stage=(layers // virtual,) * virtual,
            chunks=chunks,
        )

    @property
    def modules(self) -> tuple[Kind, ...]:
        """The model's modules in order; the head is the last."""
        if self.pattern:
            return (*self.pattern, HEAD)
        layers = [(ATTENTION, MLP)] * self.encoder_layers + [(DECODER_ATTENTION, DECODER_MLP)] * self.decoder_layers
        for layer in self.expert_layers:
            layers[layer] = ATTENTION, EXPERT_MLP
        return (*(kind for layer in layers for kind in layer), HEAD)

    @property
    def cuts(self) -> IntArray:
        """Modules before each boundary between virtual stages: int64[virtual stages - 1]."""
        return np.cumsum(self.module_counts[:-1], dtype=np.int64)

    @property
    def module_counts(self) -> Split:
        """Modules of each virtual stage, the head left out."""
        return self.layers_per_stage if self.pattern else tuple(in_modules(self.layers_per_stage))

    def over_labels(self, expert_kind: Kind | None, *, experts: bool) -> tuple[int, ...]:
        """The modules, in order, that run positions with labels alone where not all have one.

        They are the head and the MLP before it, unless that lies on an earlier stage.

        Args:
            expert_kind: of the MLPs with experts; None where there are none.
            experts: whether those do so too; they may want all positions (`integration.models.experts`).
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
        return len(self.layers_per_stage)

    @property
    def stages(self) -> int:
        """Pipeline stages, one per rank of the pipeline."""
        return self.virtual_stages // self.chunks

    @property
    def cuts_layers(self) -> bool:
        """Whether costs of a layer's attention and of its MLP are asked for apart."""
        return not {ATTENTION, MLP, EXPERT_MLP}.isdisjoint(self.pattern) or any(n % 1 for n in self.layers_per_stage)

    @property
    def _encoder_modules(self) -> int:
        return self.encoder_layers if self.pattern else 2 * self.encoder_layers

    @property
    def decoder_state_forward(self) -> tuple[bool, ...]:
        """Per boundary v → v + 1, whether activations hold the decoder's state beside the encoder's output."""
        return tuple(cut > self._encoder_modules for cut in self.cuts.tolist())

    @property
    def decoder_state_backward(self) -> tuple[bool, ...]:
        """Per boundary v → v + 1, whether a cost model charges gradients of both states.

        By the published rule, a stage that begins in the decoder returns both, also where only the encoder's output
        was handed to it.
        """
        return tuple(cut >= self._encoder_modules for cut in self.cuts.tolist())


def in_modules(split: Sequence[float]) -> list[int]:
    """Modules per virtual stage from layers."""
    return [round(2 * count) for count in split]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySettings:
    """All that a boundary's shapes depend on besides the micro-batch."""

    tensors: BoundaryTensors
    hidden_size: int
    sequence_parallel: int = 1
    """Ranks over which the first dimension is sharded: the tensor-parallel size under sequence parallelism, else 1."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.sequence_parallel < 1:
            raise PlanningError(
                f"expected a hidden size and a sequence-parallel size of at least 1, got {self.hidden_size} and "
                f"{self.sequence_parallel}"
            )

    def shapes(self, micro_batches: Sequence[Shape]) -> BoundaryShapes:
        """The shapes at every boundary for every micro-batch.

        Raises:
            PlanningError: a length is not divisible by the sequence-parallel size.
        """
        return tuple(self._of(shape) for shape in micro_batches)

    def _of(self, shape: Shape) -> tuple[tuple[TensorShape, ...], ...]:
        rank_shape: dict[BoundaryTensor, TensorShape] = {}
        for tensor, length in zip(BoundaryTensor, (shape.input_length, shape.target_length), strict=True):
            if length % self.sequence_parallel:
                raise PlanningError(
                    f"expected the lengths of shape {shape} to be divisible by the sequence-parallel size "
                    f"{self.sequence_parallel}",
                    hint="use a tensor-parallel size that divides 8, or turn sequence parallelism off",
                )
            rank_shape[tensor] = (length // self.sequence_parallel, shape.size, self.hidden_size)
        return tuple(tuple(rank_shape[tensor] for tensor in tensors) for tensors in self.tensors)
