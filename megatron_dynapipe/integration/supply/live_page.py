"""The page of a run while it trains: another process writes it every few iterations, so that a crash leaves it."""

import subprocess
import sys
from pathlib import Path

from megatron_dynapipe.errors import ExecutionError

FINISH_S = 120.0
"""How long the run's end waits for the last page."""
NICENESS = 10


class LivePage:
    """Starts `megatron-dynapipe report` beside training; while one is at work, no second one is started.

    It reads what ranks have written to the folder: those of other nodes are there if the nodes share it, and at the
    end of the run.

    Args:
        folder: of the run's records.
        every: iterations between two pages; 0 writes none.
    """

    def __init__(self, folder: Path, *, every: int) -> None:
        self._folder = folder
        self._every = every
        self._writer: subprocess.Popen[bytes] | None = None

    def after(self, iteration: int) -> None:
        """Begin a page if one is due after this iteration (counted from 0)."""
        is_due = self._every > 0 and (iteration + 1) % self._every == 0
        if is_due and (self._writer is None or self._writer.poll() is not None):
            self._writer = self._start()

    def finish(self) -> bool:
        """Write the page of the whole run; whether one is asked for.

        Raises:
            ExecutionError: that fails or takes too long.
        """
        if not self._every:
            return False
        try:
            if self._writer is not None:
                self._writer.wait(FINISH_S)
            self._writer = self._start()
            status = self._writer.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            raise ExecutionError(f"expected the page of the run within {FINISH_S:g} s, waited longer") from None
        if status:
            raise ExecutionError(
                f"expected a page of the run in {self._folder}, got exit status {status}",
                hint=f"run `megatron-dynapipe report {self._folder}`",
            )
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        # Where the log is, its errors go, too; its summary would repeat the run's.
        command = [sys.executable, "-m", "megatron_dynapipe", "report", "--quiet", str(self._folder)]
        return subprocess.Popen(["nice", "-n", str(NICENESS), *command], stdout=subprocess.DEVNULL)
