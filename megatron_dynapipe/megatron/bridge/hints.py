"""Hints of errors name flags of entry scripts; a script that calls `planned` gets its arguments in their place."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from megatron_dynapipe.core.errors import DynaPipeError

ARGUMENTS: Mapping[str, str] = {
    "long-samples": "long_samples",
    "device-memory-limit": "memory_limit_mb",
    "cluster": "cluster",
    "cost-model": "costs",
    "calibrate": "calibrate_s",
    "store-url-file": "store_url_file",
    "store-bind": "store_bind",
    "planner-cores": "planner_cores",
    "ahead": "ahead",
    "timeout-s": "timeout_s",
    "report-dir": "report_folder",
}
"""Arguments of `planned` by the names of the flags that mean the same."""
_FLAG = re.compile(
    r"--dynapipe-(" + "|".join(ARGUMENTS) + r")\b(?: (truncate|skip|fail|\d+(?:\.\d+)?|[A-Z]+|\S+\.json))?"
)


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Errors of the block have hints for a Python script."""
    try:
        yield
    except DynaPipeError as error:
        error.hint = error.hint and translated(error.hint)
        raise


def translated(hint: str) -> str:
    """A hint with `planned`'s arguments in place of flags."""

    def argument(match: re.Match[str]) -> str:
        flag, value = match.groups()
        is_text = value is not None and value.islower()
        return f"{ARGUMENTS[flag]}=" + (f'"{value}"' if is_text else value or "…")

    replaced = _FLAG.sub(argument, hint)
    return replaced if replaced == hint else f"in planned(config, …): {replaced}"
