"""What is mended inside Megatron itself for a run without CUDA: the one module of this package that imports it.

Imported by `platform.enable` after the stand-ins are in force.
"""

import importlib.util

from megatron.core.datasets import utils as _datasets_utils

from megatron_dynapipe.cpu.standins import StandIn
from megatron_dynapipe.errors import UnsupportedMegatronError


def compile_helpers() -> None:
    """Check that the helpers of Megatron's datasets are there; the wheel ships them compiled.

    Raises:
        UnsupportedMegatronError: they are not.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise UnsupportedMegatronError(
            "expected megatron-core with its compiled dataset helpers, found one without",
            hint="install megatron-core from its wheel",
        )


MENDS: tuple[StandIn, ...] = (
    StandIn(
        owner=_datasets_utils.__name__,
        name="compile_helpers",
        make=lambda original: compile_helpers,
        why="runs make in the package's folder, where the wheel has no Makefile, and exits when that fails",
    ),
)
"""Replacements in Megatron's own modules, in the form of the table of stand-ins."""
