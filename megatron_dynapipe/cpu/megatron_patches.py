"""What is patched or silenced inside Megatron itself: the one module of this package that imports it.

`platform.enable` imports it after it has set the stubs.
"""

import importlib
import importlib.util

from megatron.core.datasets import utils as _datasets_utils

from megatron_dynapipe.cpu import cuda_stubs
from megatron_dynapipe.cpu.stub_table import Stub
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


PATCHES: tuple[Stub, ...] = (
    Stub(
        owner=_datasets_utils.__name__,
        name="compile_helpers",
        make=lambda original: compile_helpers,
        why="runs make in the package's folder, where the wheel has no Makefile, and exits when that fails",
    ),
)
"""Replacements in Megatron's own modules, rows like those of the table of stubs."""

SILENCED: tuple[Stub, ...] = (
    Stub(
        owner="megatron.training.arguments",
        name="_print_args",
        make=cuda_stubs.always(cuda_stubs.nothing),
        why="prints some eight hundred lines, most of them of features that are off",
    ),
    Stub(
        owner="megatron.training.training",
        name="report_theoretical_memory",
        make=cuda_stubs.always(cuda_stubs.nothing),
        why="prints ten lines that know nothing of plans",
    ),
    Stub(
        owner="megatron.training.training",
        name="print_datetime",
        make=cuda_stubs.always(cuda_stubs.nothing),
        why="prints seven times of day at the start, beside the log's own",
    ),
)
"""Functions that print at start-up what nobody reads."""

SILENCED_ON_CPU: tuple[Stub, ...] = (
    Stub(
        owner="megatron.training.training",
        name="report_memory",
        make=cuda_stubs.always(cuda_stubs.nothing),
        why="prints, on every rank, counters that are zero without CUDA",
    ),
)
"""Functions that print what means nothing on a CPU."""


def silence_prints(*, memory: bool) -> None:
    """Make the functions of `SILENCED` (and, if `memory`, of `SILENCED_ON_CPU`) print nothing."""
    for stub in SILENCED + (SILENCED_ON_CPU if memory else ()):
        module = importlib.import_module(stub.owner)
        setattr(module, stub.name, stub.make(getattr(module, stub.name)))
