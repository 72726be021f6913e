"""A planner process below the process that trains."""

import os
import sys
from pathlib import Path
from typing import Self

from megatron_dynapipe.processes import ChildLog, package_path, start, terminate
from megatron_dynapipe.service.settings import ServiceSettings, encode_settings

STOP_TIMEOUT_S = 10.0  # it runs below training's threads, on a busy machine slowly
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

    def __enter__(self) -> Self:
        self._log = ChildLog(self._log_path)
        # A planner is one thread of its own; the cores are training's.
        env = os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
        self._process = start(_COMMAND, log=self._log, stdin=encode_settings(self._settings), env=env)
        return self

    def __exit__(self, *_: object) -> None:
        """End the process within some seconds; it may have ended already."""
        terminate(self._process, STOP_TIMEOUT_S)
        self._log.close()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()
