"""A layout as flags of a training run, and as a file that `--dynapipe-config` takes."""

from collections.abc import Mapping

from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.tuning.search import TunedLayout
from megatron_dynapipe.units import BYTES_PER_MB

type Flags = dict[str, str | int | bool]
"""Values by names of flags without dashes; of switches, whether they are given."""


def layout_flags(layout: TunedLayout, settings: PlannerSettings) -> Flags:
    """What a run needs to train under a layout.

    Args:
        layout: that was tuned.
        settings: the planner's for it.
    """
    flags: Flags = {
        "tensor-model-parallel-size": layout.tensor_parallel,
        "pipeline-model-parallel-size": layout.pipeline_parallel,
        "use-distributed-optimizer": layout.distributed_optimizer,
        "sequence-parallel": settings.sequence_parallel,
        "dynapipe-layout": layout.layout,
        "dynapipe-device-memory-limit": round(settings.memory_limit_bytes / BYTES_PER_MB),
    }
    if layout.pipeline_parallel > 1 and layout.layers_per_stage:  # Says how many chunks there are, too.
        flags["dynapipe-layers-per-stage"] = ",".join(map(str, layout.layers_per_stage))
    return flags


def run_file(flags: Mapping[str, str | int | bool], comment: str) -> str:
    """The text of a run file."""
    return "\n".join([f"# {comment}", *(f"{name}: {_word(value)}" for name, value in flags.items())]) + "\n"


def _word(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and "," in value else str(value)
