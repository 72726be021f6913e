"""A planner process below the process that trains."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from megatron_dynapipe.core.units import amount
from megatron_dynapipe.processes import ChildLog, package_path, start, terminate
from megatron_dynapipe.service.settings import ServiceSettings, encode_settings

STOP_TIMEOUT_S = 10.0  # it runs below training's threads, on a busy machine slowly
_USER_TIME = 11
_SYSTEM_TIME = 12
"""Places of `utime` and `stime` (proc(5)) among the fields after the command's name."""
_COMMAND = (sys.executable, "-P", "-m", "megatron_dynapipe.service")


class PlannerProcess:
    """Context manager: `python -m megatron_dynapipe.service` for as long as the block lasts.

    The process ends when its stdin does, so it never outlives this one, however this one ends. Nobody starts it again:
    plans that do not come are made by the nodes (`source`).
    """

    def __init__(self, settings: ServiceSettings, *, log_path: Path | None = None) -> None:
        """Only keep the settings; entering the block starts the process.

        Args:
            settings: what is planned, and where plans go.
            log_path: file to which the process's output is appended; None keeps its end in memory alone.
        """
        self._settings = settings
        self._log_path = log_path
        self._processor_s = 0.0

    def __enter__(self) -> Self:
        self._log = ChildLog(self._log_path)
        # A planner's threads are those that its settings name; the other cores are training's.
        env = os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
        self._began = time.monotonic()
        self._process = start(_COMMAND, log=self._log, stdin=encode_settings(self._settings), env=env)
        return self

    def __exit__(self, *_: object) -> None:
        """End the process within some seconds; it may have ended already."""
        terminate(self._process, STOP_TIMEOUT_S)
        self._log.close()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        self._note_time()  # which is gone once the status was asked for
        return self._process.poll()

    @property
    def load(self) -> str:
        """Cores that it has taken in the mean since its start, of those that it may take: "0.8 of 4 cores"."""
        self._note_time()
        elapsed_s = max(time.monotonic() - self._began, 1e-9)
        return f"{self._processor_s / elapsed_s:.1f} of {amount(self._settings.cores, 'core')}"

    def _note_time(self) -> None:
        """Read how much processor time it has taken, unless it has ended and its status was asked for."""
        if self._process.returncode is None:
            with suppress(OSError, ValueError, IndexError):  # where the kernel does not say
                fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
                self._processor_s = ticks / os.sysconf("SC_CLK_TCK")
