"""Step functions in Megatron's form, and the device batches they take.

A step function takes one micro-batch from its iterator, runs the model, and returns the model's output with the
function that turns it into a loss. The loss of a micro-batch is a sum over its target tokens; Megatron divides the
summed gradients by the number of tokens of the whole global batch (`--calculate-per-token-loss`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import unwrap_model

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.data.iterator import gathered
from megatron_dynapipe.data.segments import RowSegments, causal_mask
from megatron_dynapipe.megatron.equip.attention import has_engine_attention
from megatron_dynapipe.megatron.equip.experts import routers_of
from megatron_dynapipe.megatron.equip.told import Told
from megatron_dynapipe.megatron.execution.megatron_stage import DeviceBatch
from megatron_dynapipe.megatron.execution.task_losses import BY_TASK, sums_by_task
from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME
from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, attention_row, self_row
from megatron_dynapipe.megatron.models.t5_inputs import T5StageInputs, padded_attention

MakeBatch = Callable[[HostMicroBatch, torch.device], DeviceBatch]
"""Makes what a step function takes from host tensors."""
LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def _is_of_t5(chunk: torch.nn.Module) -> bool:
    """Whether a chunk is a stage of a T5, which says what modules it has."""
    return hasattr(chunk, "stage_modules")


def required_fields(models: Sequence[torch.nn.Module]) -> RequiredFields:
    """The tensors of a micro-batch that a rank's model chunks read."""
    chunks = unwrap_model(list(models))
    if stages := [chunk.stage_modules for chunk in chunks if _is_of_t5(chunk)]:
        return RequiredFields(
            tokens=any(stage.starts_encoder for stage in stages),
            decoder_tokens=any(stage.starts_decoder for stage in stages),
            labels=any(stage.ends_decoder for stage in stages),
        )
    return RequiredFields(
        tokens=any(chunk.pre_process for chunk in chunks),
        labels=any(chunk.post_process for chunk in chunks),
        samples=bool(routers_of(models)),
    )


def batch_maker(models: Sequence[torch.nn.Module]) -> MakeBatch:
    """The function that makes batches for a rank's model chunks."""
    if any(map(_is_of_t5, unwrap_model(list(models)))):
        return partial(t5_batch, engine=has_engine_attention(models))
    return partial(gpt_batch, explicit_mask=takes_mask(models))


def takes_mask(models: Sequence[torch.nn.Module]) -> bool:
    """Whether a GPT's attention needs a causal mask: only Megatron's unfused one does."""
    return any(isinstance(module, DotProductAttention) for model in models for module in model.modules())


def check_losses(losses: Sequence[dict[str, torch.Tensor]]) -> None:
    """Stop, with Megatron's own diagnosis, where an iteration's loss is not finite.

    Once for all micro-batches, and after their passes: a look at each of them would wait for the device each time.
    Megatron's state machine calls for it inside the schedule function, as it may run the iteration again.
    """
    if not losses:
        return
    total = torch.stack([report[LOSS_NAME][0] for report in losses]).sum()
    get_rerun_state_machine().validate_result(
        result=total,
        rejection_func=lambda loss: not bool(torch.isfinite(loss)),
        message="found NaN or Inf in local forward loss calculation",
        tolerance=0.0,
        fatal=True,
    )


def masked_loss(
    loss_mask: torch.Tensor, output: torch.Tensor, tasks: torch.Tensor | None = None, task_rows: int | None = None
) -> LossReport:
    """Sum of the losses that count, their number, and both for the log.

    Args:
        loss_mask: [b, t], 1 where a label counts.
        output: [b, t] loss of every position.
        tasks: [b, t], the task of every position, to report each task's loss too.
        task_rows: as `rows` of `sums_by_task`.
    """
    mask = loss_mask.view(-1).float()
    losses = output.view(-1).float() * mask
    loss = torch.sum(losses)
    tokens = mask.sum().detach().to(torch.int)
    report = {LOSS_NAME: torch.stack([loss.detach(), tokens.to(loss.dtype)])}
    if tasks is not None:
        report[BY_TASK] = sums_by_task(losses.detach(), mask, tasks, task_rows)
    return loss, tokens, report


def gpt_batch(host: HostMicroBatch, device: torch.device, *, explicit_mask: bool) -> DeviceBatch:
    """The inputs of `gpt_step`: tokens [b, s] and labels where the stage has them, positions, mask.

    Labels and their mask are [b, s], or the labelled rows' alone, [1, n]. `told` is what `MegatronStage` tells
    modules: the packed row, labelled rows, samples.

    Args:
        host: the collated micro-batch.
        device: where the tensors go.
        explicit_mask: local attention takes a mask of padded rows; Transformer Engine's causal kernel wants none.
    """
    segments = host.input_segments
    packed = (
        () if segments is None else (segments.offsets, segments.positions, segments.key_offsets, segments.key_places)
    )
    texts = (host.tokens, host.labels, host.loss_mask, host.tasks, host.rows, host.samples)
    tokens, labels, loss_mask, tasks, rows, samples, *moved = copy_to(device, (*texts, *packed))
    length = host.shape.input_length
    row = None
    positions: torch.Tensor | None = torch.arange(length, device=device).expand(host.shape.size, -1)
    if segments is not None:
        row = self_row(_on_device(segments, moved))
        positions = row.positions if row.positions is None else row.positions.expand(host.shape.size, -1)
    return {
        "tokens": tokens,
        "position_ids": positions,
        "attention_mask": causal_mask(length, device) if explicit_mask and row is None else None,
        "labels": labels,
        "loss_mask": loss_mask,
        "tasks": tasks,
        "task_rows": _task_rows(host),
        "told": Told(row=row, rows=rows, samples=samples, sample_count=len(host.input_lengths)),
    }


def gpt_step(batches: Iterator[DeviceBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., LossReport]]:
    """One micro-batch through this stage of a `GPTModel`."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(masked_loss, batch["loss_mask"], tasks=batch["tasks"], task_rows=batch["task_rows"])


def t5_batch(host: HostMicroBatch, device: torch.device, *, engine: bool = False) -> DeviceBatch:
    """The inputs of `t5_step`: the tokens and labels that the stage has, and every mask or row, from lengths alone.

    Args:
        host: the collated micro-batch.
        device: where the tensors go.
        engine: whether attention is Transformer Engine's, which takes padded rows without masks, too.
    """
    texts = (host.tokens, host.decoder_tokens, host.labels, host.loss_mask, host.tasks)
    if host.input_segments is not None and host.decoder_segments is not None:
        segments = host.input_segments, host.decoder_segments
        packed = [tensor for segment in segments for tensor in (segment.offsets, segment.positions)]
        tokens, decoder_tokens, labels, loss_mask, tasks, *moved = copy_to(device, (*texts, *packed))
        encoder = _on_device(segments[0], moved[:2])
        decoder = _on_device(segments[1], moved[2:])
        cross = attention_row(decoder, encoder)
        attention: dict[str, Any] = {
            "encoder_row": self_row(encoder),
            "decoder_row": self_row(decoder, cross),
        }
    else:
        lengths = host.input_lengths, host.decoder_lengths
        tokens, decoder_tokens, labels, loss_mask, tasks, *moved = copy_to(device, (*texts, *lengths))
        input_lengths, decoder_lengths = map(_given, moved)
        attention = padded_attention(host.shape, input_lengths, decoder_lengths, engine=engine)
    inputs = T5StageInputs(tokens=tokens, decoder_tokens=decoder_tokens, labels=labels, **attention)
    return {"inputs": inputs, "loss_mask": loss_mask, "tasks": tasks, "task_rows": _task_rows(host)}


def t5_step(batches: Iterator[DeviceBatch], model: torch.nn.Module) -> tuple[Any, Callable[..., LossReport]]:
    """One micro-batch through this stage of a T5."""
    batch = next(batches)
    loss = partial(masked_loss, batch["loss_mask"], tasks=batch["tasks"], task_rows=batch["task_rows"])
    return model(batch["inputs"]), loss


STEPS = {ModelFamily.GPT: gpt_step, ModelFamily.T5: t5_step}
"""Megatron's forward step of each family."""


def _task_rows(host: HostMicroBatch) -> int | None:
    """One more than the last task of a micro-batch, as the host knows it."""
    return None if host.tasks is None else int(host.tasks.max()) + 1


def _given(lengths: torch.Tensor | None) -> torch.Tensor:
    assert lengths is not None, "an encoder–decoder batch"
    return lengths


def _on_device(segments: RowSegments, moved: Sequence[torch.Tensor | None]) -> DeviceSegments:
    offsets, positions, *cut = moved
    assert offsets is not None and positions is not None, "every stage has them"
    key_offsets, key_places = cut or (None, None)
    return DeviceSegments(
        host=segments, offsets=offsets, positions=positions, key_offsets=key_offsets, key_places=key_places
    )


def copy_to(device: torch.device, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copy tensors to the device, in their order; None stays None, and a CPU takes the tensors as they are.

    It is one copy, of the pinned buffer in which they lie or are gathered: a copy from other memory waits for the
    device's work.
    """
    if device.type == "cpu":
        return list(tensors)
    copied = copy_buffer(device, tensors)
    return copy_buffer(device, gathered(tensors, pin=True)) or list(tensors) if copied is None else copied


def copy_buffer(device: torch.device, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    """Copy tensors as `copy_to`, if they lie in one buffer, which is copied; None if they do not."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    if len(storages) != 1:
        return None
    storage = next(tensor for tensor in tensors if tensor is not None).untyped_storage()
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, non_blocking=True, copy=True)
    return [None if tensor is None else _same_view(tensor, buffer) for tensor in tensors]


def _same_view(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    return buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
