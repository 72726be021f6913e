"""The same training without a GPU: what Megatron needs when CUDA is absent.

At the top of a script, before Megatron is imported: `quieten()` (to filter start-up messages), `enable()`, then
`silence_prints()`; later `set_args_defaults(parser)`. With a CUDA device `enable()` touches nothing.
"""

from megatron_dynapipe.cpu.flags import ARGS_DEFAULTS, set_args_defaults
from megatron_dynapipe.cpu.log_filter import quieten, silence_prints
from megatron_dynapipe.cpu.platform import (
    Device,
    disable,
    enable,
    enabled,
    is_enabled,
    is_needed,
)

__all__ = [
    "ARGS_DEFAULTS",
    "Device",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "is_needed",
    "quieten",
    "silence_prints",
    "set_args_defaults",
]
