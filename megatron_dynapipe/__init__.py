"""DynaPipe for Megatron-LM: micro-batches of varying shape, planned ahead of training, executed from instructions.

The flow of one iteration is the order of the packages: `sampling` → `core` (with `costing` and `ways`) → `store` →
`data` → `core` again (with `runtime`) → `megatron`, or `modules` for models without Megatron. `docs/design.md` draws
it.

The names below are loaded when they are first used, so that importing the package imports neither torch nor Megatron.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_dynapipe.megatron.entry import checkout as checkout_hooks  # noqa: F401  (what patches import)
    from megatron_dynapipe.modules import (
        CutPoint,
        DynaPipeDataLoader,
        ModulePlanner,
        Pipeline,
        SharedModule,
        Stage,
        profile_module,
        split_model,
    )
    from megatron_dynapipe.runtime import PipelineExecutor
    from megatron_dynapipe.tools.batch import PlannedBatch, plan_batch
    from megatron_dynapipe.tools.megatron_pipeline import MegatronPipeline
    from megatron_dynapipe.tools.tuning import orchestrate, tune

_LAZY = {
    name: f"megatron_dynapipe.{module}"
    for module, names in {
        "tools.megatron_pipeline": "MegatronPipeline",
        "modules": "CutPoint DynaPipeDataLoader ModulePlanner Pipeline SharedModule Stage profile_module split_model",
        "tools.batch": "PlannedBatch plan_batch",
        "runtime": "PipelineExecutor",
        "tools.tuning": "orchestrate tune",
    }.items()
    for name in names.split()
}
_HOOKS = "checkout_hooks"
"""The module that patched checkouts import: its name here stays, so that they work with later versions."""

__all__ = [
    "CutPoint",
    "DynaPipeDataLoader",
    "MegatronPipeline",
    "ModulePlanner",
    "Pipeline",
    "PipelineExecutor",
    "PlannedBatch",
    "SharedModule",
    "Stage",
    "__version__",
    "orchestrate",
    "plan_batch",
    "planned",
    "profile_module",
    "split_model",
    "tune",
]


def planned(trained: Any, *arguments: object, **settings: object) -> AbstractContextManager[Any]:
    """Have a training loop run planned passes for the length of a block.

    Args:
        trained: a recipe of Megatron-Bridge, the list of model chunks that a loop of your own trains, or the family
            ("gpt", "t5") of what the command line of an entry script says.
        arguments: what `bridge.planned`, `tools.loop.planned` or `megatron.entry.runs.planned` takes after it.
        settings: its keywords.
    """
    module = "megatron.entry.runs" if isinstance(trained, str) else "bridge"
    module = "tools.loop" if isinstance(trained, list | tuple) else module
    door = import_module(f"megatron_dynapipe.{module}").planned
    opened: AbstractContextManager[Any] = door(trained, *arguments, **settings)
    return opened


def __getattr__(name: str) -> object:
    if name == _HOOKS:
        return import_module("megatron_dynapipe.megatron.entry.checkout")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        from megatron_dynapipe.extras import missing

        if told := missing(error):
            raise told from error
        raise
    return getattr(module, name)
