"""Planned iterations inside Megatron-Bridge's training loop, which stays as it is.

    with planned(config, dataset="DATASET") as run:
        finetune(config=config, forward_step_func=forward_step)

    the recipe ──► refusals ──► settings of plans ──► planner process ──► schedule function of Bridge's loop
    its samples or a dataset folder ─────────────────────┘

`docs/bridge.md` shows how to use it.
"""

from megatron_dynapipe.bridge.planned import planned
from megatron_dynapipe.bridge.run import PlannedRecipe

__all__ = ["PlannedRecipe", "planned"]
