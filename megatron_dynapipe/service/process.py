"""Starting, watching and stopping planner processes from the process that trains.

job of 3 planners on 2 nodes    planner 0    1    2    3: the stand-in, on rank 0's node
node 0                                  0         2   (3)
node 1                                       1
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.processes import ChildLog, package_path, start, terminate
from megatron_dynapipe.service.client import PlannerFailure, publish_failure
from megatron_dynapipe.service.settings import ServiceSettings, encode_settings

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
RESTARTS = 3
"""How often a planner that was killed starts again; then its end is an error."""
_COMMAND = (sys.executable, "-P", "-m", "megatron_dynapipe.service")


class PlannerProcess:
    """Context manager: `python -m megatron_dynapipe.service` for as long as the block lasts.

    The process ends when its stdin does, so it never outlives this one, however this one ends. If a signal kills it, a
    thread here starts it again; if it dies of an error, or too often, the thread publishes how, so that every rank
    that waits for a plan learns it at once.
    """

    def __init__(self, settings: ServiceSettings, *, log_path: Path | None = None, restarts: int = RESTARTS) -> None:
        """Only keep the settings; entering the block starts the process.

        Args:
            settings: what is planned, and where plans go.
            log_path: file to which the process's output is appended; None keeps its end in memory alone.
            restarts: how often it starts again after a signal killed it.
        """
        self._restarts = restarts
        self._lock = threading.Lock()
        self._settings = settings
        self._log_path = log_path
        self._failure: PlannerFailure | None = None
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        self._log = ChildLog(self._log_path)
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="planner-watcher", daemon=True)
        self._watcher.start()
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        # A planner is one thread of its own; the cores are training's.
        env = os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
        return start(_COMMAND, log=self._log, stdin=encode_settings(self._settings), env=env)

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise `PlannerFailedError`, with the last lines it printed, if the process has died."""
        if self._process.poll() is not None and self._failure is None:
            self._watcher.join(STOP_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure.to_error()

    def stop(self) -> None:
        """End the process within some seconds; it may have ended already."""
        with self._lock:  # none is started from now on
            self._stopping.set()
        terminate(self._process, STOP_TIMEOUT_S)
        self._watcher.join(STOP_TIMEOUT_S)
        self._log.close()

    def _watch(self) -> None:
        """Wait for the process's end; publish it unless everything was planned or the end was asked for."""
        status = self._process.wait()
        while status < 0 and self._restart(status):
            status = self._process.wait()
        if status == 0 or self._stopping.is_set():
            return
        failure = PlannerFailure(
            planner=self._settings.planner,
            doing="running",
            error=f"its process {self._process.pid} ended with exit status {status}",
            hint="it was killed, often for want of memory" if status == -signal.SIGKILL else None,
            details=self._log.tail(40) or "(it printed nothing)",
        )
        self._failure = failure
        try:
            with self._settings.open_store(is_known=True) as store:
                publish_failure(store, self._settings.keys, failure)
        except StoreError as error:
            logger.warning("the planner died, and its failure cannot be published: %s", error)

    def _restart(self, status: int) -> bool:
        """Start a process that was killed again; False if that has been done too often, or the end was asked for."""
        with self._lock:
            if self._stopping.is_set() or not self._restarts:
                return False
            self._restarts -= 1
            logger.warning(
                "planner %d was killed (%s), and starts again", self._settings.planner, signal.Signals(-status).name
            )
            self._process = self._start()
            return True


class NodePlanners:
    """Context manager on one process of each node: its planners, for as long as the block lasts."""

    def __init__(self, settings: ServiceSettings, *, node: int, nodes: int, log_folder: Path) -> None:
        self._settings = settings
        self._node, self._nodes = node, nodes
        self._log_folder = log_folder
        self._processes = ExitStack()
        self._lock = threading.Lock()
        self._has_stand_in = False

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._processes)
            for planner in range(self._node, self._settings.planners, self._nodes):
                self._start(planner)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._has_stand_in = True  # none is started from now on
        self._processes.close()

    def start_stand_in(self) -> None:
        """Start a planner that plans what is about to be late, once: the others may hang. Called from any thread."""
        with self._lock:
            if not self._has_stand_in:
                self._has_stand_in = True
                logger.warning("a plan is late: starting planner %d to help", self._settings.planners)
                self._start(self._settings.planners)

    def _start(self, planner: int) -> None:
        settings = msgspec.structs.replace(self._settings, planner=planner)
        log = self._log_folder / f"planner-{planner}.log"
        self._processes.enter_context(PlannerProcess(settings, log_path=log))
