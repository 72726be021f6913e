"""What a model's parameters, gradients and optimizer states take on the ranks of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dynapipe.core.costs import EXPERT_MLP, MLP, IntArray, Kind
from megatron_dynapipe.core.model import PipelineLayout
from megatron_dynapipe.costing.stage_modules import StageModules, stage_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class EndState:
    """Parameter bytes (2 bytes each) of what is outside layers, besides the word embeddings, on one rank.

    Attributes:
        tied: whether the head's weight is the word embeddings': a copy, on a stage that does not have these.
        positions: of learned positions, on every stage with word embeddings.
        encoder_tables, decoder_tables: of relative biases, on every stage with such layers.
        norm: after the last layer of each stack.
        head_biases: of the head.
    """

    tied: bool
    positions: int = 0
    encoder_tables: int = 0
    decoder_tables: int = 0
    norm: int = 0
    head_biases: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Parameter bytes (2 bytes each) on one tensor-parallel rank.

    Attributes:
        modules: of one module of each kind but the head; of attention is all of a layer where it is not known how a
            layer's are divided.
        embedding_bytes: of the word embeddings.
        expert_bytes: of the experts in a module that has them, part of it.
        expert_parallel: ranks that share them; `expert_bytes` are those of one.
        ends: of the rest; None where it is not known, as in files, for which the published rule counts the word
            embeddings alone.
        gradient_bytes: of one parameter's gradient; Megatron adds gradients of half precision up in fp32, the
            published rule counts 2.
    """

    modules: Mapping[Kind, int]
    embedding_bytes: int
    ends: EndState | None = None
    gradient_bytes: int = 2
    expert_bytes: int = 0
    expert_parallel: int = 1

    @property
    def expert_kind(self) -> Kind | None:
        """The modules that hold experts, if there are any."""
        if not self.expert_bytes:
            return None
        return EXPERT_MLP if EXPERT_MLP in self.modules else MLP


def model_state_bytes(
    layout: PipelineLayout, state: ModelState, *, data_parallel: int, distributed_optimizer: bool
) -> IntArray:
    """Parameters, gradients and optimizer state per pipeline stage: int64[stages].

    For a parameter's 2 bytes there are those of its gradient, and 12 of the optimizer (fp32 parameters and two
    moments), which the distributed optimizer shards over the replicas.
    """
    per_stage = parameter_bytes(layout, state)
    experts = expert_bytes(layout, state)
    sharded = per_stage * 6
    if distributed_optimizer:
        sharded = -(-(per_stage - experts) * 6 // data_parallel)
        sharded += -(-experts * 6 * state.expert_parallel // data_parallel)
    return np.asarray(per_stage * (2 + state.gradient_bytes) // 2 + sharded, np.int64)


def expert_bytes(layout: PipelineLayout, state: ModelState) -> IntArray:
    """Bytes of one rank's experts, 2 a parameter, per pipeline stage: int64[stages]."""
    return _bytes(layout, {} if state.expert_kind is None else {state.expert_kind: state.expert_bytes})


def _bytes(layout: PipelineLayout, modules: Mapping[Kind, int], besides: Sequence[int] | int = 0) -> IntArray:
    """Bytes of modules, and others of each virtual stage, per pipeline stage: int64[stages]."""
    kinds = tuple(dict.fromkeys(layout.modules))
    of_kind = np.array([modules.get(kind, 0) for kind in kinds], np.int64)
    per_stage = layout.counts(kinds) @ of_kind + np.asarray(besides)
    return np.asarray(per_stage.reshape(layout.chunks, layout.stages).sum(axis=0), np.int64)


def parameter_bytes(layout: PipelineLayout, state: ModelState) -> IntArray:
    """Bytes of parameters, 2 each, per pipeline stage: int64[stages].

    Where nothing is known but embeddings and layers, one embedding lies on the first stage and, for T5, one on the
    first decoder stage.
    """
    stages = stage_modules(layout)
    if state.ends is not None:
        return _bytes(layout, state.modules, [_outside_layers(stage, state, state.ends) for stage in stages])
    besides = [0] * len(stages)
    besides[0] = state.embedding_bytes
    if layout.model.decoder:
        besides[[stage.starts_decoder for stage in stages].index(True)] += state.embedding_bytes
    return _bytes(layout, state.modules, besides)


def _outside_layers(stage: StageModules, state: ModelState, ends: EndState) -> int:
    """Parameter bytes of a virtual stage besides its layers'."""
    is_t5 = stage.decoder_depth > 0
    head = stage.ends_decoder if is_t5 else stage.ends_encoder
    total = attends(stage.encoder) * ends.encoder_tables + attends(stage.decoder) * ends.decoder_tables
    if stage.embeds:
        total += state.embedding_bytes + ends.positions
    if head and not (ends.tied and stage.embeds):
        total += state.embedding_bytes
    return total + (stage.ends_encoder + stage.ends_decoder) * ends.norm + head * ends.head_biases


def attends(modules: range) -> bool:
    """Whether there is attention among modules of one stack."""
    return len(modules) > modules.start % 2
