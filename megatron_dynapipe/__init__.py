"""DynaPipe for Megatron-LM: micro-batches of varying shape, planned ahead of training, executed from instructions.

The flow of one iteration is the order of the packages: `sampling` → `planning` (with `cost`) → `plan` → `store` →
`data` → `runtime` → `integration`. `docs/design.md` draws it.

The names below are loaded when they are first used, so that importing the package imports neither torch nor Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_dynapipe.integration.entry.megatron_pipeline import MegatronPipeline
    from megatron_dynapipe.runtime import PipelineExecutor

_LAZY = {
    "MegatronPipeline": "megatron_dynapipe.integration.entry.megatron_pipeline",
    "PipelineExecutor": "megatron_dynapipe.runtime",
}

__all__ = ["MegatronPipeline", "PipelineExecutor", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
