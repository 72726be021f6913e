"""A planned micro-batch in the form in which Bridge's step functions take a batch."""

import torch

from megatron_dynapipe.data.collate import HostMicroBatch
from megatron_dynapipe.integration.execution.megatron_stage import DeviceBatch
from megatron_dynapipe.integration.execution.step_functions import gpt_batch
from megatron_dynapipe.integration.models.packed_rows import RowFormat


def bridge_batch(host: HostMicroBatch, device: torch.device, *, explicit_mask: bool) -> DeviceBatch:
    """The batch of a micro-batch: tokens, labels, loss mask and positions, [b, s] each, and where packed samples lie.

    Args:
        host: the collated micro-batch.
        device: where the tensors go.
        explicit_mask: attention takes a causal mask (Megatron's local one).
    """
    batch = gpt_batch(host, device, explicit_mask=explicit_mask, row_format=RowFormat.TRANSFORMER_ENGINE)
    made = {name: batch[name] for name in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")}
    row = batch["packed_seq_params"]
    if row is None:
        return made
    # Bridge reads the two lengths on the host.
    return made | {
        "cu_seqlens_q": row.cu_seqlens_q,
        "cu_seqlens_kv": row.cu_seqlens_kv,
        "max_seqlen_q": torch.tensor(row.max_seqlen_q, dtype=torch.int32),
        "max_seqlen_kv": torch.tensor(row.max_seqlen_kv, dtype=torch.int32),
    }
