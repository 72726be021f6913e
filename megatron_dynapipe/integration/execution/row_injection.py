"""Packed rows for a model that is built, and stepped, by a patched checkout's own script.

Its step function knows nothing of packed rows, and asking Megatron's helpers for them would read offsets on the host.
So rows are put into the model's call, and Megatron's unfused attention, which takes none, gets ours beside it.
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
        self._row: PackedSeqParams | None = None
        self._prepared: set[int] = set()

    def wrap(self, forward_step: ForwardStep) -> ForwardStep:
        """The step function, for batches with `packed_seq_params`."""

        def step(batches: Iterator[DeviceBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(batches)
            self._prepare(model)
            self._row = batch["packed_seq_params"]
            try:
                return forward_step(iter((dict(batch),)), model)
            finally:
                self._row = None

        return step

    def _prepare(self, model: nn.Module) -> None:
        """Once for each model chunk."""
        if id(model) in self._prepared:
            return
        self._prepared.add(id(model))
        inner: Any = unwrap_model(model)
        inner.register_forward_pre_hook(self._give, with_kwargs=True)
        for module in list(inner.modules()):
            if isinstance(module, Attention) and isinstance(module.core_attention, DotProductAttention):
                module.core_attention = EitherAttention(module, module.core_attention)

    def _give(self, _model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if self._row is None:
            return arguments, keywords
        positional = [None if place == _MASK else value for place, value in enumerate(arguments)]
        unmasked = {"attention_mask": None} if "attention_mask" in keywords else {}
        return tuple(positional), {**keywords, **unmasked, "packed_seq_params": self._row}


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
