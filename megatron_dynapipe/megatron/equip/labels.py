"""Heads over positions with labels, in a model whose step function knows labels of all positions.

    host [b, s] ──► labels [1, n] ──► model ──► losses [1, n] ──► [b, s], 0 where there is no label ──► host

The host's loss function, whichever it is, sees losses and a mask of all positions, and nothing of the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_dynapipe.megatron.equip.told import Channel, Told


def equip_labels(chunks: Sequence[nn.Module], channel: Channel) -> None:
    """Have the chunk that ends the model take the labels that are told, and give losses back at their places."""

    def give(_chunk: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        labels = channel.told.labels
        return arguments, dict(keywords) if labels is None else {**keywords, "labels": labels}

    def give_back(_chunk: nn.Module, _arguments: Any, losses: Any) -> Any:
        return losses if channel.told.labels is None else spread(losses, channel.told)

    for chunk in unwrap_model(list(chunks)):
        if getattr(chunk, "post_process", False):
            chunk.register_forward_pre_hook(give, with_kwargs=True)
            chunk.register_forward_hook(give_back)


def spread(values: Tensor, told: Told) -> Tensor:
    """What rows have, at their places: [1, n] → [b, s]; rows that do not count have the place of some other."""
    assert told.rows is not None and told.counts is not None, "rows with labels"
    size, length = told.shape
    counted = values * told.counts.to(values.dtype)
    flat = values.new_zeros(length * size).index_add(0, told.rows, counted.view(-1))
    return flat.view(length, size).t().contiguous()


def for_all_positions(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of `step_functions.gpt_batch` for a host's step function, which has labels of all positions, [b, s]."""
    told: Told = batch["told"]
    if told.rows is None or batch["labels"] is None:
        return dict(batch)
    shape = tuple(batch["position_ids"].shape)
    told = replace(told, labels=batch["labels"], counts=batch["loss_mask"], shape=shape)
    return {
        **batch,
        "labels": spread(batch["labels"], told),
        "loss_mask": spread(batch["loss_mask"], told),
        "told": told,
    }
