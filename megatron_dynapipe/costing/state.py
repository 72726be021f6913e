"""What a model's parameters, gradients and optimizer states take on the ranks of a pipeline."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_dynapipe.core.costs import (
    ATTENTION,
    EXPERT_MLP,
    MLP,
    Division,
    EndState,
    IntArray,
    Kind,
    LayerKind,
    ModelState,
)
from megatron_dynapipe.core.model import PipelineLayout
from megatron_dynapipe.costing.adapters import ATTENTION_LINEARS, MLP_LINEARS
from megatron_dynapipe.costing.modules import parameter_bytes as bytes_of_modules
from megatron_dynapipe.costing.shape import ModelShape
from megatron_dynapipe.costing.stage_modules import StageModules, stage_modules

_GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, as Megatron adds gradients up."""


def model_state_bytes(
    layout: PipelineLayout, state: ModelState, *, data_parallel: int, distributed_optimizer: bool
) -> IntArray:
    """Parameters, gradients and optimizer state per pipeline stage: int64[stages].

    For a parameter's 2 bytes there are its gradient's, and 12 of the optimizer (fp32 parameters and two
    moments), which the distributed optimizer shards over the replicas; both of trained parameters alone.
    """
    trained = trained_bytes(layout, state)
    experts = expert_bytes(layout, state)
    sharded = trained * 6
    if distributed_optimizer:
        sharded = -(-(trained - experts) * 6 // data_parallel)
        sharded += -(-experts * 6 * state.expert_parallel // data_parallel)
    return np.asarray(parameter_bytes(layout, state) + trained * state.gradient_bytes // 2 + sharded, np.int64)


def trained_bytes(layout: PipelineLayout, state: ModelState) -> IntArray:
    """Bytes of parameters that are trained, 2 each, per pipeline stage: int64[stages]."""
    return parameter_bytes(layout, state) if state.trained is None else _bytes(layout, state.trained)


def expert_bytes(layout: PipelineLayout, state: ModelState) -> IntArray:
    """Bytes of one rank's trained experts, 2 a parameter, per pipeline stage: int64[stages]."""
    if state.expert_kind is None or state.trained is not None:
        return _bytes(layout, {})
    return _bytes(layout, {state.expert_kind: state.expert_bytes})


def _bytes(layout: PipelineLayout, modules: Mapping[Kind, int], besides: Sequence[int] | int = 0) -> IntArray:
    """Bytes of modules, and others of each virtual stage, per pipeline stage: int64[stages]."""
    kinds = tuple(dict.fromkeys(layout.modules))
    of_kind = np.array([modules.get(kind, 0) for kind in kinds], np.int64)
    per_stage = layout.counts(kinds) @ of_kind + np.asarray(besides)
    return np.asarray(per_stage.reshape(layout.chunks, layout.stages).sum(axis=0), np.int64)


def parameter_bytes(layout: PipelineLayout, state: ModelState) -> IntArray:
    """Bytes of parameters, 2 each, per pipeline stage: int64[stages].

    If nothing is known but embeddings and layers, one embedding lies on the first stage and, for T5, one on the
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
    """Parameter bytes of a virtual stage outside of its layers."""
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


def state_of(shape: ModelShape, divisions: Mapping[LayerKind, Division], *, tensor_parallel: int = 1) -> ModelState:
    """The parameters of a model on one of its tensor-parallel ranks, of layers that are divided as `divisions` say."""
    has_decoder = shape.family.is_encoder_decoder
    attention = shape.attention_parameters(tensor_parallel)
    mlp = shape.mlp_parameters(tensor_parallel)
    dense = shape.dense.mlp_parameters(tensor_parallel)
    norm = shape.norm_parameters(shape.hidden)
    tables = shape.relative_buckets * shape.heads
    rows = shape.rows(tensor_parallel) // tensor_parallel
    layers: dict[LayerKind, int] = {"encoder": 2 * (attention + dense)}
    if has_decoder or shape.kinds > 1:
        layers["decoder" if has_decoder else "expert"] = 2 * ((1 + has_decoder) * attention + mlp)
    return ModelState(
        embedding_bytes=2 * rows * shape.hidden,
        modules=bytes_of_modules(layers, divisions),
        expert_bytes=2 * shape.expert_parameters(tensor_parallel),
        ends=EndState(
            tied=shape.tied,
            positions=2 * shape.positions * shape.hidden,
            encoder_tables=2 * tables,
            decoder_tables=2 * tables if has_decoder else 0,
            norm=2 * norm,
            head_biases=2 * rows if has_decoder and shape.tied else 0,
        ),
        gradient_bytes=_GRADIENT_BYTES,
        trained=_trained(shape, tensor_parallel),
    )


def _trained(shape: ModelShape, tensor_parallel: int) -> Mapping[Kind, int] | None:
    if shape.adapters is None:
        return None
    return {
        ATTENTION: 2 * shape.adapter_parameters(ATTENTION_LINEARS, tensor_parallel),
        MLP: 2 * shape.dense.adapter_parameters(MLP_LINEARS, tensor_parallel),
        EXPERT_MLP: 2 * shape.adapter_parameters(MLP_LINEARS, tensor_parallel),
    }
