"""Processes that a killed rank leaves behind become children of its agent, which ends them; Linux only."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 2.0


def adopt() -> None:
    """Become the parent of descendants whose own parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_adopted(known: set[int]) -> int:
    """End all children but the known ones, and wait for them; how many there were."""
    ended = 0
    for attempt in (signal.SIGTERM, signal.SIGKILL):
        found = children() - known
        for child in found:
            with suppress(ProcessLookupError):
                os.kill(child, attempt)
        ended = max(ended, len(found))
        deadline = time.monotonic() + _GRACE_S
        while found and time.monotonic() < deadline:
            found = {child for child in found if not _reaped(child)}
            time.sleep(0.02)
    return ended


def children() -> set[int]:
    """Process ids of this process's children."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children") if sys.platform == "linux" else ():
        with suppress(OSError):
            found |= set(map(int, task.read_text().split()))
    return found


def _reaped(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True
