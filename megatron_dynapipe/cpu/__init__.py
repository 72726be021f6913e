"""The same training without a GPU: what Megatron needs when CUDA is absent.

`enable()` before Megatron is imported, `ARGS_DEFAULTS` among the defaults of its arguments, `quieten()` if start-up
noise is not wanted. With a CUDA device nothing is touched.
"""

from megatron_dynapipe.cpu.flags import ARGS_DEFAULTS
from megatron_dynapipe.cpu.noise import quieten
from megatron_dynapipe.cpu.platform import (
    KNOWN_MEGATRON_VERSIONS,
    check_megatron_version,
    disable,
    enable,
    enabled,
    is_enabled,
    is_needed,
)

__all__ = [
    "ARGS_DEFAULTS",
    "KNOWN_MEGATRON_VERSIONS",
    "check_megatron_version",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "is_needed",
    "quieten",
]
