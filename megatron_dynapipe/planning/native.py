"""The compiled core, where it was built; every caller has a pure Python twin for where it was not."""

import importlib
import logging
from types import ModuleType

_logger = logging.getLogger(__name__)


def load() -> ModuleType | None:
    """`megatron_dynapipe.planning._native`, or None with a notice: planning works without it, but slowly."""
    try:
        return importlib.import_module("megatron_dynapipe.planning._native")
    except ImportError as error:
        _logger.warning(
            "notice: the native planner core is not built (%s); planning runs in pure Python, many times slower", error
        )
        return None


NATIVE = load()
