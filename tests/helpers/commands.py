"""Running programs, with what they print."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The checkout."""


def run(
    *words: str | Path,
    status: int | None = 0,
    cwd: Path = ROOT,
    timeout_s: float = 120,
    stdin: str | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended with this status (None: any), with variables besides this process's."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(words, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=timeout_s)
    assert status in (None, done.returncode), f"status {done.returncode}: {done.stdout[-3000:]}{done.stderr[-4000:]}"
    return done


def run_python(*words: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """`run` of this Python."""
    return run(sys.executable, *words, **how)
