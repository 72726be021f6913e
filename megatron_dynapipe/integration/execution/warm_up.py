"""A forward and a backward pass of a small micro-batch under each mode of recomputation, before any list is run.

CUDA loads a kernel when it is first used, cuBLAS picks one, compiled functions are compiled: each may wait for the
device. Inside a list the device may stand at a receive, whose sender may wait likewise. Here nothing is pending.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.integration.execution.megatron_stage import DeviceBatch, ForwardStep, MegatronStage
from megatron_dynapipe.integration.hooks.timers import without_timers
from megatron_dynapipe.plan.instructions import Backward, Buffer, Forward, Load
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.runtime import BufferTable, Handlers, PassContext, pass_handlers
from megatron_dynapipe.units import LENGTH_MULTIPLE, ModelFamily, Recompute, Shape

LENGTH = 8 * LENGTH_MULTIPLE
"""Positions of the micro-batch, where samples may be as long."""


def warm_up(
    models: Sequence[torch.nn.Module],
    settings: PlannerSettings,
    *,
    forward_step: ForwardStep,
    make_batch: Callable[[HostMicroBatch], DeviceBatch],
    prepare: Callable[[Recompute], None],
    required: RequiredFields,
    stage: int,
    longest: Shape,
    dtype: torch.dtype,
) -> None:
    """Run every chunk of this rank's stage once under every mode that plans may choose; gradients are zero after it.

    All ranks of a stage call it; stages do not talk to each other.

    Args:
        models: this rank's model chunks, wrapped in Megatron's `DistributedDataParallel`.
        settings: those that plans are made with.
        forward_step: Megatron's step function.
        make_batch: host tensors to what it takes.
        prepare: sets the modules to a mode.
        required: which tensors the stage reads.
        stage: of this rank.
        longest: the longest samples' shape.
        dtype: of the states between stages.
    """
    shape = Shape(1, min(LENGTH, longest.input_length), min(LENGTH, longest.target_length))
    device = next(models[0].parameters()).device
    boundaries = BoundarySettings(
        tensors=boundary_tensors(settings.layout),
        hidden_size=settings.hidden_size,
        sequence_parallel=settings.tensor_parallel if settings.sequence_parallel else 1,
    ).shapes([shape])[0]
    config, stages = get_model_config(models[0]), settings.pipeline_parallel
    host = _micro_batch(settings.family, shape, required)
    for mode in settings.recompute:
        prepare(mode)
        model = MegatronStage(models, forward_step, lambda _: make_batch(host), is_last=stage == stages - 1)
        handlers = pass_handlers(PassContext(model=model, stage=stage, stages=stages, chunks=len(models)))
        with ExitStack() as unreduced, without_timers(config):
            for chunk_model in models:
                unreduced.enter_context(_wrapped(chunk_model).no_sync())
            for chunk in range(len(models)):
                virtual = chunk * stages + stage
                received = boundaries[virtual - 1] if virtual else ()
                states = [torch.zeros(each, dtype=dtype, device=device) for each in received]
                _run(handlers, chunk, states, sends=virtual + 1 < settings.layout.virtual_stages)
    for chunk_model in models:
        _wrapped(chunk_model).zero_grad_buffer()


def _run(handlers: Handlers, chunk: int, received: Sequence[torch.Tensor], *, sends: bool) -> None:
    buffers = BufferTable()
    handlers[Load](Load(0), buffers)
    if received:
        buffers.put(Buffer.INPUT, 0, chunk, received)
    handlers[Forward](Forward(0, chunk), buffers)
    if sends:
        outputs = buffers.tensors(Buffer.OUTPUT, 0, chunk)
        buffers.put(Buffer.OUTPUT_GRAD, 0, chunk, [torch.zeros_like(output) for output in outputs])
    handlers[Backward](Backward(0, chunk), buffers)


def _micro_batch(family: ModelFamily, shape: Shape, required: RequiredFields) -> HostMicroBatch:
    """One sample of padding tokens that fills its row; every label counts."""
    t5 = family is ModelFamily.T5
    row = torch.zeros(1, shape.input_length, dtype=torch.int64)
    targets = torch.zeros(1, shape.target_length, dtype=torch.int64) if t5 else row
    return HostMicroBatch(
        index=0,
        family=family,
        shape=shape,
        input_lengths=torch.tensor([shape.input_length], dtype=torch.int32),
        decoder_lengths=torch.tensor([shape.target_length], dtype=torch.int32) if t5 else None,
        input_segments=None,
        decoder_segments=None,
        tokens=row if required.tokens else None,
        decoder_tokens=targets if t5 and required.decoder_tokens else None,
        labels=targets if required.labels else None,
        loss_mask=torch.ones(targets.shape) if required.labels else None,
    )


def _wrapped(model: torch.nn.Module) -> Any:
    """Megatron's wrapper has methods that `nn.Module` does not know."""
    return model
