"""Waiting in tests, with a deadline."""

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
