"""What a recipe's built model can be given, as settings of plans; what it lacks is said once, by name."""

from collections.abc import Sequence
from typing import Any

from megatron.core.utils import unwrap_model
from torch import nn

from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.equip.experts import routers_of, uncut_because
from megatron_dynapipe.megatron.equip.linears import undivided_because
from megatron_dynapipe.megatron.equip.probe import lacking
from megatron_dynapipe.outputs import say
from megatron_dynapipe.runtime.control_group import ControlGroup

FREE: dict[str, Any] = {
    "micro_batch_layouts": tuple(BatchLayout),
    "slices": "auto",
    "split_backward": "auto",
}
"""Settings of plans for a model that lacks nothing."""
_WHATS = ("packed rows", "pieces of samples", "divided backward passes")


def capabilities(models: Sequence[nn.Module], control: ControlGroup) -> dict[str, Any]:
    """Settings of `PlannerSettings` that all stages' chunks allow; every rank calls it, at the same point."""
    packed, pieces = lacking(models, equip(models))
    divided, terms = undivided_because(unwrap_model(list(models))), "terms" if routers_of(models) else ""
    here = (packed, pieces or uncut_because(models), divided, terms)
    everywhere = [text.split("\n") for text in control.gather_texts("\n".join(here))]
    packed, pieces, divided, terms = (next(filter(None, reasons), "") for reasons in zip(*everywhere, strict=True))
    if control.rank == 0:
        for what, reason in zip(_WHATS, (packed, pieces, divided), strict=True):
            if reason:
                say(f"{what}: off, since {reason}")
    off = {
        "micro_batch_layouts": (BatchLayout.PADDED,) if packed else None,
        "slices": "off" if pieces else None,
        "split_backward": "off" if divided else None,
    }
    return FREE | {name: value for name, value in off.items() if value} | {"label_experts": not terms}
