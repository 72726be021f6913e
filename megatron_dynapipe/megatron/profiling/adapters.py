"""Megatron-Bridge's adapters in a layer that is measured: its other weights are frozen, as in training."""

import importlib

from torch import nn

from megatron_dynapipe.core.errors import ConfigError, UnsupportedMegatronError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.adapters import Adapters, Kind
from megatron_dynapipe.extras import check_bridge
from megatron_dynapipe.megatron.hooks.compatibility import Name, missing_name

_CLASSES: dict[Kind, tuple[str, str]] = {
    "lora": ("megatron.bridge.peft.lora", "LoRA"),
    "dora": ("megatron.bridge.peft.dora", "DoRA"),
}
NAMES: tuple[Name, ...] = (
    *((*place, ("target_modules", "dim", "dropout")) for place in _CLASSES.values()),
    ("megatron.bridge.peft.base", "PEFT.__call__", ("model", "training")),
)
"""What is called of Megatron-Bridge, each with the parameters that are passed."""
_DROPOUT = 0.1
"""Before A, if there is any: every rate costs the same."""


def check(family: ModelFamily) -> None:
    """Check that adapters can be put in place in layers of a model.

    Raises:
        ConfigError: it is a T5.
        InstallationError: there is no Megatron-Bridge.
        UnsupportedMegatronError: it lacks a name that is called.
    """
    if family.is_encoder_decoder:
        raise ConfigError("expected adapters of a GPT, got them of a T5")
    check_bridge()
    if missing := list(filter(None, map(missing_name, NAMES))):
        raise UnsupportedMegatronError(
            f"Megatron-Bridge lacks what layers with adapters are measured by: {'; '.join(missing)}",
            hint="install the version that the extra [bridge] names",
        )


def put_adapters(module: nn.Module, adapters: Adapters, *, layers: bool) -> None:
    """Freeze a part's weights; in one that has layers, put adapters in place, which are trained.

    Args:
        module: the part, as megatron-core builds it.
        adapters: that a run trains.
        layers: whether the part has any.
    """
    if not layers:
        module.requires_grad_(False)
        return
    owner, name = _CLASSES[adapters.kind]
    made = getattr(importlib.import_module(owner), name)(
        target_modules=list(adapters.linears), dim=adapters.dim, dropout=_DROPOUT if adapters.dropout else 0.0
    )
    made(module, training=True)
