"""Where Megatron is replaced: one table of names, on request, reversibly.

`megatron.training.training` imports the schedule factory by value, so the name is replaced there as well as where it
is defined.
"""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

from megatron_dynapipe.errors import ConfigError, UnsupportedMegatronError

KNOWN_VERSIONS = ("0.19.2",)
"""Versions of `megatron-core` on which the table below has been tried."""

SCHEDULE_FACTORIES = (
    ("megatron.core.pipeline_parallel.schedules", "get_forward_backward_func"),
    ("megatron.core.pipeline_parallel", "get_forward_backward_func"),
    ("megatron.training.training", "get_forward_backward_func"),
)
"""The factory by which `train` and `evaluate` pick a schedule function, under every name that leads to it."""

_replaced: list[tuple[Any, str, Any]] = []


def install(schedule: Callable[..., Any]) -> None:
    """Make Megatron's training loop run `schedule` in place of its own schedule functions.

    Raises:
        UnsupportedMegatronError: the installed Megatron is not a known version.
        ConfigError: a schedule is installed already.
    """
    version = importlib.metadata.version("megatron-core")
    if version not in KNOWN_VERSIONS:
        raise UnsupportedMegatronError(
            f"expected megatron-core of one of the versions {', '.join(KNOWN_VERSIONS)}, got {version}",
            hint="install one of these versions",
        )
    if _replaced:
        raise ConfigError("expected no schedule to be installed in Megatron yet, got a second one")

    def factory(*_arguments: Any, **_keywords: Any) -> Callable[..., Any]:
        return schedule

    for module_name, name in SCHEDULE_FACTORIES:
        module = importlib.import_module(module_name)
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, factory)


def uninstall() -> None:
    """Put Megatron's own names back; nothing happens if none was replaced."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


@contextlib.contextmanager
def installed(schedule: Callable[..., Any]) -> Iterator[None]:
    """`install` for the length of a block."""
    install(schedule)
    try:
        yield
    finally:
        uninstall()
