"""Communicators, and passes of small micro-batches of every kind, before any list is run.

CUDA loads a kernel when it is first used, cuBLAS picks one, compiled functions are compiled: each may wait for the
device. Inside a list the device may stand at a receive, whose sender may wait likewise. Here nothing is pending.

Functions compiled by `torch.compile` (Megatron's fused bias-GELU and SwiGLU among them) are compiled for one shape,
then once more with the dimensions left open that were found to differ; a dimension of 1 and gradients on or off are
told apart. So two lengths, one row and several, padded and packed, training and evaluation leave nothing to compile;
one length is enough where nothing is compiled (TORCH_COMPILE_DISABLE).
What picks a kernel by its sizes, as cuBLAS does, meets the first plan's sizes when its list is run alone
(`forward_backward.run_iteration`). It need not meet sizes of later plans: on several stages all kernels of libraries
are loaded from the start (`CUDA_MODULE_LOADING=EAGER`, `entry/bootstrap.py`), so that another pick loads nothing.
Kernels that cuDNN compiles for Transformer Engine's attention are not among these: rows of another power of two of
positions or samples (`models/engine_attention.py`) may load one later. No device has shown whether that waits for a
pending receive; the watchdogs would name such a wait (docs/reliability.md).
"""

import importlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch._dynamo import config as dynamo

from megatron_dynapipe.core.instructions import Backward, Buffer, Forward, Load, TensorShape
from megatron_dynapipe.core.model import boundary_shapes, boundary_tensors
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute, Shape, round_up
from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.megatron.execution.megatron_stage import DeviceBatch, ForwardStep, MegatronStage
from megatron_dynapipe.megatron.hooks.timers import without_timers
from megatron_dynapipe.runtime import BufferTable, PassContext, pass_handlers

LENGTH = 8
"""Positions of the longer padded micro-batches, in multiples of lengths, where samples may be as long."""
ROWS = (272, 400)
"""Positions of packed rows: three and four blocks of `flex_attention`; none is full."""


def warm_up(
    models: Sequence[Any],
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
    """Run every chunk of this rank's stage under every mode that plans may choose; gradients are zero after it.

    All ranks of a stage call it; stages do not talk to each other. `make_batch`, `required` and `longest` are
    `IterationRunner`'s; `prepare` sets the modules to a mode; `dtype` is that of the states between stages.
    """
    _prepare_compiler()
    device = next(models[0].parameters()).device
    _make_communicators(models, device)
    micro_batches = _micro_batches(settings, longest, required)
    config = get_model_config(models[0])
    stages = settings.pipeline_parallel
    runs = [(mode, False) for mode in settings.recompute] + [(settings.recompute[0], True)]
    for (mode, forward_only), host in itertools.product(runs, micro_batches):
        prepare(mode)
        model = MegatronStage(models, forward_step, partial(_load, make_batch, host), is_last=stage == stages - 1)
        context = PassContext(model=model, stage=stage, stages=stages, chunks=len(models), forward_only=forward_only)
        boundaries = _boundaries(settings, host.shape)
        with ExitStack() as resources, without_timers(config):
            for chunk_model in models:
                resources.enter_context(chunk_model.no_sync())
                chunk_model.train(not forward_only)
                resources.callback(chunk_model.train)
            for chunk in range(len(models)):
                virtual = chunk * stages + stage
                received = boundaries[virtual - 1] if virtual else ()
                states = [torch.zeros(shape, dtype=dtype, device=device) for shape in received]
                _run(context, chunk, states, sends=virtual + 1 < settings.layout.virtual_stages)
    for chunk_model in models:
        chunk_model.zero_grad_buffer()


def _load(make_batch: Callable[[HostMicroBatch], DeviceBatch], host: HostMicroBatch, _index: int) -> DeviceBatch:
    return make_batch(host)


def _make_communicators(models: Sequence[Any], device: torch.device) -> None:
    """Use every group that passes and reductions use, once; all ranks use them in one order.

    NCCL makes a group's communicator at its first use, for which the host waits and memory is allocated: inside a list
    others may be waiting for this stage meanwhile.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    used = [groups.tp, groups.embd]
    if get_model_config(models[0]).num_moe_experts is not None:
        used += [groups.ep, groups.tp_ep]
    for model in models:
        for reduced in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
            used += [getattr(reduced, name, None) for name in _REDUCTION_GROUPS]
    for group in {id(group): group for group in used}.values():
        if isinstance(group, dist.ProcessGroup):  # of one rank, too, which reductions use as they do others
            dist.all_reduce(torch.zeros(1, device=device), group=group)


_REDUCTION_GROUPS = (
    "data_parallel_group",
    "intra_distributed_optimizer_instance_group",
    "inter_distributed_optimizer_instance_group",
)
"""Attributes of Megatron's groups of buckets."""


def _prepare_compiler() -> None:
    """Room for all kinds of micro-batches, above which functions would run uncompiled; no timing of kernels."""
    dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILATIONS)
    if torch.cuda.is_available() and not dynamo.disable:
        importlib.import_module("torch._inductor.config").triton.autotune_pointwise = False  # it waits for the device


_RECOMPILATIONS = 64


def _boundaries(settings: PlannerSettings, shape: Shape) -> Sequence[Sequence[TensorShape]]:
    (shapes,) = boundary_shapes(
        boundary_tensors(settings.layout),
        [shape],
        hidden_size=settings.hidden_size,
        sequence_parallel=settings.tensor_parallel if settings.sequence_parallel else 1,
    )
    return shapes


def _run(context: PassContext, chunk: int, received: Sequence[torch.Tensor], *, sends: bool) -> None:
    handlers = pass_handlers(context)
    buffers = BufferTable()
    handlers[Load](Load(0), buffers)
    if received:
        buffers.put(Buffer.INPUT, 0, chunk, received)
    handlers[Forward](Forward(0, chunk), buffers)
    if context.forward_only:
        return
    if sends:
        outputs = buffers.tensors(Buffer.OUTPUT, 0, chunk)
        buffers.put(Buffer.OUTPUT_GRAD, 0, chunk, [torch.zeros_like(output) for output in outputs])
    handlers[Backward](Backward(0, chunk), buffers)


def _micro_batches(settings: PlannerSettings, longest: Shape, required: RequiredFields) -> list[HostMicroBatch]:
    """One padded row and two, of two lengths, as far as samples are as long; packed rows of two lengths.

    Of one length without a compiler.
    """
    count = 1 if dynamo.disable else 2
    family = settings.model.family
    batch_layouts = settings.micro_batch_layouts
    micro_batches = []
    multiple = settings.length_multiple
    longer = [min(LENGTH * multiple, length) for length in longest[1:]]
    for lengths in (longer, [round_up(length // 2, multiple) for length in longer])[:count]:
        sizes = (1, 2) if BatchLayout.PADDED in batch_layouts else ()
        micro_batches += [_micro_batch(family, Shape(size, *lengths), required) for size in sizes]
    for least in ROWS[:count] if BatchLayout.PACKED in batch_layouts else ():
        positions = round_up(least, multiple)
        shape = Shape(1, positions, positions if family.is_encoder_decoder else 0)
        samples = -(-positions // min(filter(None, longest[1:])))
        micro_batches.append(_micro_batch(family, shape, required, samples=samples))
    return micro_batches


def _micro_batch(family: ModelFamily, shape: Shape, required: RequiredFields, *, samples: int = 0) -> HostMicroBatch:
    """Samples of padding tokens that fill their rows, in a packed row so many; every label counts."""
    has_decoder = family.is_encoder_decoder
    size, inputs, outputs = shape
    row = torch.zeros(size, inputs, dtype=torch.int64)
    targets = torch.zeros(size, outputs, dtype=torch.int64) if has_decoder else row
    return HostMicroBatch(
        index=0,
        family=family,
        shape=shape,
        input_lengths=torch.full((size,), inputs, dtype=torch.int32),
        decoder_lengths=torch.full((size,), outputs, dtype=torch.int32) if has_decoder else None,
        input_segments=_segments(inputs, samples) if samples else None,
        decoder_segments=_segments(outputs, samples) if samples and has_decoder else None,
        tokens=row if required.tokens else None,
        decoder_tokens=targets if has_decoder and required.decoder_tokens else None,
        labels=targets if required.labels else None,
        loss_mask=torch.ones(targets.shape) if required.labels else None,
    )


def _segments(positions: int, samples: int) -> RowSegments:
    """A row of samples of nearly one length."""
    return RowSegments.of([positions * sample // samples for sample in range(samples + 1)], positions)
