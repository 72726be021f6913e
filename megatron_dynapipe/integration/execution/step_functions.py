"""Step functions in Megatron's form, and the device batches they take.

A step function takes one micro-batch from its iterator, runs the model, and returns the model's output with the
function that turns it into a loss. The loss of a micro-batch is a sum over its target tokens; Megatron divides the
summed gradients by the number of tokens of the whole global batch (`--calculate-per-token-loss`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_dynapipe.data.collate import HostMicroBatch
from megatron_dynapipe.data.masks import causal_mask, cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.integration.execution.stage_handlers import DeviceBatch
from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME
from megatron_dynapipe.integration.models.t5_stage import T5StageInputs

LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def masked_loss(loss_mask: torch.Tensor, output: torch.Tensor, *, check_for_nan: bool) -> LossReport:
    """Sum of the losses that count, their number, and both for the log.

    Args:
        loss_mask: [b, t], 1 where a label counts.
        output: [b, t] loss of every position.
        check_for_nan: stop, with Megatron's own diagnosis, where the sum is not finite.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if check_for_nan:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {LOSS_NAME: torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def gpt_batch(host: HostMicroBatch, device: torch.device, *, explicit_mask: bool) -> DeviceBatch:
    """What `gpt_step` takes: tokens and labels [b, s] where the stage has them, positions, causal mask.

    Args:
        host: the collated micro-batch.
        device: where the tensors go.
        explicit_mask: local attention takes a mask; Transformer Engine's causal kernel wants none.
    """
    length = host.shape.input_length
    return {
        "tokens": _moved(host.tokens, device),
        "position_ids": torch.arange(length, device=device).expand(host.shape.size, -1),
        "attention_mask": causal_mask(length, device) if explicit_mask else None,
        "labels": _moved(host.labels, device),
        "loss_mask": _moved(host.loss_mask, device),
    }


def gpt_step(
    batches: Iterator[DeviceBatch], model: torch.nn.Module, *, check_for_nan: bool
) -> tuple[torch.Tensor, Callable[..., LossReport]]:
    """One micro-batch through this stage of a `GPTModel`."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(masked_loss, batch["loss_mask"], check_for_nan=check_for_nan)


def t5_batch(host: HostMicroBatch, device: torch.device) -> DeviceBatch:
    """What `t5_step` takes: the tokens and labels that the stage has, and every mask, from lengths alone."""
    _, input_length, target_length = host.shape
    assert host.decoder_lengths is not None, "an encoder–decoder batch"
    input_lengths, decoder_lengths = _moved(host.input_lengths, device), _moved(host.decoder_lengths, device)
    assert input_lengths is not None and decoder_lengths is not None
    inputs = T5StageInputs(
        tokens=_moved(host.tokens, device),
        decoder_tokens=_moved(host.decoder_tokens, device),
        encoder_mask=encoder_mask(input_lengths, input_length),
        decoder_mask=decoder_mask(decoder_lengths, target_length),
        cross_mask=cross_mask(input_lengths, target_length, input_length),
        labels=_moved(host.labels, device),
    )
    return {"inputs": inputs, "loss_mask": _moved(host.loss_mask, device)}


def t5_step(
    batches: Iterator[DeviceBatch], model: torch.nn.Module, *, check_for_nan: bool
) -> tuple[Any, Callable[..., LossReport]]:
    """One micro-batch through this stage of a T5."""
    batch = next(batches)
    return model(batch["inputs"]), partial(masked_loss, batch["loss_mask"], check_for_nan=check_for_nan)


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """A host tensor on the device, through pinned memory: other copies wait for the device's work."""
    if tensor is None or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


StepFunction = Callable[[Iterator[DeviceBatch], torch.nn.Module], tuple[Any, Callable[..., Any]]]
