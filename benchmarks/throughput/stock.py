"""Megatron's own GPT under its own schedule, with nothing of this project in between: rows of one length.

The tokens of a global batch are cut into rows of the maximum length. The size of micro-batches is found in the warm-up.
"""

import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args

from benchmarks.throughput.job import Job
from benchmarks.throughput.model import weights_of_products, wrapped
from benchmarks.throughput.rows import equal_rows
from megatron_dynapipe.megatron.models.specs import CoreAttention, run_classes, with_classes
from tests.helpers.stock_megatron import forward_step, model_provider

SIZES = (1, 2, 4)


def fastest_layer(device: torch.device) -> ModuleSpec:
    """Transformer Engine's where it is, else Megatron's local one around PyTorch's attention in one kernel."""
    args = get_args()
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        return get_gpt_layer_with_transformer_engine_spec()
    classes = run_classes(core_transformer_config_from_args(args), CoreAttention.SDPA)
    layer: ModuleSpec = with_classes(get_gpt_layer_local_spec(normalization=args.normalization), classes)
    return layer


class StockJob(Job):
    """The pipeline of Megatron's `get_forward_backward_func` on this rank."""

    def prepare(self, _settings: Any, _costs: Any, _tokens: Any) -> None:
        """Build Megatron's GPT with its own layers."""
        run = self._setup.args
        config = core_transformer_config_from_args(run)
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = finalize_model_grads
        config.variable_seq_lengths = False
        module = self.model(config).to(device=self._setup.device, dtype=run.params_dtype)
        (self._model,), self._optimizer = wrapped(self._setup, [module])
        self.weights = weights_of_products([self._model], run)
        config.no_sync_func = self._model.no_sync
        config.grad_scale_func = self._optimizer.scale_loss
        self._size: int | None = None

    def model(self, config: Any) -> torch.nn.Module:
        """Megatron's GPTModel."""
        model: torch.nn.Module = model_provider(
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            config=config,
            layer=fastest_layer(self._setup.device),
        )
        return model

    def _run(self, number: int) -> dict[str, Any]:
        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        every = equal_rows(self.samples(number), self._setup.args.seq_length + 1, multiple=replicas)
        rows = torch.from_numpy(every[replica::replicas]).to(self._setup.device)
        if self._size is None:
            self._size = self._fastest(rows)
        size = self._size
        loss, figures = self.timed(lambda: self._step(rows, size))
        losses = [each for each in self.gathered(round(loss * 1e6)) if each]  # known on the last stage, 0 on the others
        return figures | {
            "idle": [],
            "real_tokens": every.size,
            "positions": every.size,
            "micro_batches": len(every) // size,
            "predicted_ms": None,
            "planning_ms": None,
            "loss": sum(losses) / len(losses) / 1e6,  # replicas have equally many tokens
            "share_of_peak": self.share_of_peak(every.size, figures["ms"]),
        }

    def _fastest(self, rows: Any) -> int:
        """The size of micro-batches that takes the least time, of those that divide the rows."""
        times = {}
        for size in (size for size in SIZES if len(rows) % size == 0):
            self._step(rows, size)
            times[size] = self.timed(lambda size=size: self._step(rows, size))[1]["ms"]
        return min(times, key=times.__getitem__)

    def _step(self, rows: Any, size: int) -> float:
        """One iteration; its loss on the last stage, else 0."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows.split(size)),
            model=[self._model],
            num_microbatches=len(rows) // size,
            seq_length=rows.size(1) - 1,
            micro_batch_size=size,
            forward_only=False,
        )
        self._optimizer.step()
        total = sum(float(report["lm loss"][0]) for report in reports)
        tokens = sum(float(report["lm loss"][1]) for report in reports)
        return total / tokens if tokens else 0.0
