"""Spans of OpenTelemetry around passes, as Megatron's own schedules have them: main of 2026-08, with nemo-lens."""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megatron_dynapipe.core.instructions import EFFECTS, Pass, Work

GROUP = "microbatch"
"""Megatron's group of spans; its flags say which groups are on."""


def pass_span(instruction: Pass) -> AbstractContextManager[object]:
    """A span around one pass; nothing where there is no OpenTelemetry."""
    if (managed_span := _managed_span()) is None:
        return nullcontext()
    name = "forward" if EFFECTS[type(instruction)].work is Work.FORWARD else "backward"
    return managed_span(
        GROUP, f"megatron.microbatch.{name}", micro_batch=instruction.micro_batch, chunk=instruction.chunk
    )


@functools.cache
def _managed_span() -> Callable[..., AbstractContextManager[object]] | None:
    try:
        managed_span: Callable[..., AbstractContextManager[object]]
        managed_span = importlib.import_module("nemo.lens.helpers").managed_span
    except ImportError:
        return None
    return managed_span
