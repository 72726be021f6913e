"""A planned micro-batch in the form in which Bridge's step functions take a batch."""

import torch

from megatron_dynapipe.data.collate import HostMicroBatch
from megatron_dynapipe.megatron.equip.labels import for_all_positions
from megatron_dynapipe.megatron.execution.megatron_stage import DeviceBatch
from megatron_dynapipe.megatron.execution.step_functions import gpt_batch

FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "told")


def bridge_batch(host: HostMicroBatch, device: torch.device, *, explicit_mask: bool) -> DeviceBatch:
    """The batch of a micro-batch: tokens, labels, loss mask and positions, [b, s] each, and what is told with them.

    Args:
        host: the collated micro-batch.
        device: where the tensors go.
        explicit_mask: attention takes a causal mask (Megatron's local one).
    """
    batch = for_all_positions(gpt_batch(host, device, explicit_mask=explicit_mask))
    return {name: batch[name] for name in FIELDS}
