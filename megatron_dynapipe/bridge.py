"""Planned iterations inside Megatron-Bridge's training loop, which stays as it is.

    with planned(config, dataset="DATASET") as run:
        finetune(config=config, forward_step_func=forward_step)

    the recipe ──► refusals ──► settings of plans ──► planner process ──► schedule function of Bridge's loop
    its samples or a dataset folder ─────────────────────┘

`docs/bridge.md` shows how to use it.
"""

from typing import TYPE_CHECKING, Any

from megatron_dynapipe.extras import check_bridge

if TYPE_CHECKING:
    from megatron_dynapipe.megatron.bridge.entry import planned
    from megatron_dynapipe.megatron.bridge.run import PlannedRecipe

__all__ = ["PlannedRecipe", "planned"]


def __getattr__(name: str) -> Any:
    """What the package offers, imported when it is used: modules that need no Megatron-Bridge import without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_bridge()
    from megatron_dynapipe.megatron.bridge import entry, run

    return entry.planned if name == "planned" else run.PlannedRecipe
