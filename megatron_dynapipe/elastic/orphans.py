"""Processes whose parent dies: ranks end with their launcher, an agent ends what a killed rank leaves. Linux only."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from megatron_dynapipe.processes import set_parent_death_signal

_GRACE_S = 2.0


def end_with_launcher(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this rank once torchrun or `launch` has ended, by SIGKILL too.

    Nothing happens under another launcher: a rank that a shell started in the background may outlive the shell.

    Between the rank's start and this call its launcher may have ended already. Then the parent is another process by
    now, or was when it was first asked for; in that case the rank has no peers to meet and ends by its timeout.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    set_parent_death_signal(number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_adopted(known: set[int]) -> None:
    """End all children but the known ones, and wait for them."""
    for attempt in (signal.SIGTERM, signal.SIGKILL):
        found = children() - known
        for child in found:
            with suppress(ProcessLookupError):
                os.kill(child, attempt)
        deadline = time.monotonic() + _GRACE_S
        while found and time.monotonic() < deadline:
            found = {child for child in found if not _reaped(child)}
            time.sleep(0.02)


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
