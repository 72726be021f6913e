"""What is patched or silenced inside Megatron itself: the one module of this package that imports it.

`platform.enable` imports it after it has set the stubs.
"""

import importlib

from megatron.core.datasets import utils as _datasets_utils

from megatron_dynapipe.cpu import cuda_stubs
from megatron_dynapipe.cpu.stub_table import Stub

PATCHES: tuple[Stub, ...] = (
    Stub(
        owner=_datasets_utils.__name__,
        name="compile_helpers",
        make=cuda_stubs.always(cuda_stubs.nothing),
        why="runs make in the package's folder, where the wheel has no Makefile, and exits when that fails; planned"
        " runs use none of these helpers of Megatron's own datasets",
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
