"""Megatron's own GPT under its own schedule on packed rows, as its `pretrain_gpt.py --sft` trains them.

Rows are those of Megatron's `SFTDataset`: samples one after another up to the maximum length, where each begins
(`cu_seqlens`), and padding behind the last one, to which it belongs. They reach Megatron's layers, Transformer Engine's
where it is installed, as `PackedSeqParams` of the format "thd", a row to a micro-batch. Samples are the other methods',
and so are the positions that count, so that the first loss is theirs.
"""

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args

from benchmarks.throughput.rows import Row, packed_rows
from benchmarks.throughput.stock import StockJob, fastest_layer
from megatron_dynapipe.data.spans import LossOn


class StockPackedJob(StockJob):
    """Megatron's GPT over packed rows on this rank."""

    def model(self, config: Any) -> torch.nn.Module:
        """Megatron's GPTModel, with all that run files say of its positions."""
        args = get_args()
        return GPTModel(
            config=config,
            transformer_layer_spec=fastest_layer(self._setup.device),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
        )

    def _run(self, number: int) -> dict[str, Any]:
        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        samples = self.samples(number)
        every = packed_rows(
            samples, self._setup.args.seq_length, targets_alone=self._loss_on is LossOn.TARGETS, multiple=replicas
        )
        batches = [self._on_device(row) for row in every[replica::replicas]]
        loss, figures = self.timed(lambda: self._step_packed(batches))
        counted = sum(row.loss_mask.sum() for row in every)
        sums = self.gathered(round(loss * 1e6))  # known on the last stage, 0 on the others
        tokens = sum(len(given) + len(wanted) for given, wanted in samples)
        return figures | {
            "idle": [],
            "real_tokens": tokens,
            "share_of_peak": self.share_of_peak(tokens, figures["ms"]),
            "positions": sum(len(row.tokens) for row in every),
            "micro_batches": len(batches),
            "predicted_ms": None,
            "planning_ms": None,
            "loss": sum(sums) / float(counted) / 1e6,
        }

    def _on_device(self, row: Row) -> dict[str, Any]:
        device = self._setup.device
        offsets = torch.from_numpy(row.offsets).to(device)
        longest = int(np.diff(row.offsets).max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        tensors = {
            name: torch.from_numpy(getattr(row, name))[None].to(device)
            for name in ("tokens", "labels", "loss_mask", "positions")
        }
        return tensors | {"packed": packed}

    def _step_packed(self, batches: list[dict[str, Any]]) -> float:
        """One iteration; the sum of its losses on the last stage, else 0."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=self._setup.args.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.step()
        return sum(float(report["lm loss"][0]) for report in reports)


def forward_step(batches: Any, model: torch.nn.Module) -> Any:
    """Megatron's step function on a packed row."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=batch["packed"])

    def loss_function(output: torch.Tensor) -> Any:
        mask = batch["loss_mask"].view(-1)
        total = torch.sum(output.view(-1).float() * mask)
        count = mask.sum().to(torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

    return losses, loss_function
