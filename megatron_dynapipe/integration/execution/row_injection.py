"""Packed rows, and rows with labels alone, for a model that a patched checkout's own script builds and steps.

Its step function knows nothing of packed rows, and asking Megatron's helpers for them would read offsets on the host.
So rows are put into the model's call, and Megatron's unfused attention, which takes none, gets ours beside it.

Nor does it know that labels and losses may be those of some positions. It broadcasts labels of all positions over
tensor-parallel ranks; the model's call takes those of its own rank's batch instead, and losses go back to their places:

    script [b, s] ──► labels [1, n] ──► model ──► losses [1, n] ──► [b, s], 0 where there is no label ──► script
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_dynapipe.integration.execution.megatron_stage import DeviceBatch, ForwardStep
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention

_MASK = 2
"""Place of the attention mask among the arguments of `GPTModel`."""


class RowInjection:
    """Wraps a checkout's step function, so that its model is called with the row of the batch that it takes."""

    def __init__(self) -> None:
        self._batch: DeviceBatch = {}
        self._prepared: set[int] = set()

    def wrap(self, forward_step: ForwardStep) -> ForwardStep:
        """The step function, for batches of `step_functions.gpt_batch`."""

        def step(batches: Iterator[DeviceBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(batches)
            self._prepare(model)
            self._batch = batch
            given = dict(batch)
            if batch["rows"] is not None:
                given["labels"] = _spread(batch, batch["labels"])
                given["loss_mask"] = _spread(batch, batch["loss_mask"])
            try:
                return forward_step(iter((given,)), model)
            finally:
                self._batch = {}

        return step

    def _prepare(self, model: nn.Module) -> None:
        """Once for each model chunk."""
        if id(model) in self._prepared:
            return
        self._prepared.add(id(model))
        inner: Any = unwrap_model(model)
        inner.register_forward_pre_hook(self._give, with_kwargs=True)
        if inner.post_process:
            inner.register_forward_hook(self._spread_losses)
        for module in list(inner.modules()):
            if isinstance(module, Attention) and isinstance(module.core_attention, DotProductAttention):
                module.core_attention = EitherAttention(module, module.core_attention)

    def _give(self, _model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if self._batch.get("rows") is not None:
            keywords = {**keywords, "labels": self._batch["labels"]}
        if (row := self._batch.get("packed_seq_params")) is None:
            return arguments, keywords
        positional = [None if place == _MASK else value for place, value in enumerate(arguments)]
        unmasked = {"attention_mask": None} if "attention_mask" in keywords else {}
        return tuple(positional), {**keywords, **unmasked, "packed_seq_params": row}

    def _spread_losses(self, _model: nn.Module, _inputs: Any, losses: Tensor) -> Tensor:
        return losses if self._batch.get("rows") is None else _spread(self._batch, losses)


def _spread(batch: DeviceBatch, values: Tensor) -> Tensor:
    """What rows have, at their places, [1, n] → [b, s]; padding has 0, and the place of some other row."""
    size, length = batch["position_ids"].shape
    counted = values * batch["loss_mask"].to(values.dtype)
    flat = values.new_zeros(length * size).index_add(0, batch["rows"], counted.view(-1))
    return flat.view(length, size).t().contiguous()


class EitherAttention(nn.Module):
    """Megatron's core attention for padded rows, ours for packed ones; neither has parameters."""

    def __init__(self, attention: Attention, padded: nn.Module) -> None:
        super().__init__()
        self.padded = padded
        self.packed = SdpaCoreAttention(
            attention.config, attention.layer_number, attention.attn_mask_type, attention.attention_type
        )

    def forward(
        self, *tensors: Tensor | None, packed_seq_params: PackedSeqParams | None = None, **options: Any
    ) -> torch.Tensor:
        """Run either of them."""
        core = self.padded if packed_seq_params is None else self.packed
        attended: torch.Tensor = core(*tensors, packed_seq_params=packed_seq_params, **options)
        return attended
