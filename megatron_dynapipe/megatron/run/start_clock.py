"""The parts of a run's start, from the launch of this process to the end of the first iteration.

launch ── imports ── arguments ── costs ── layer split ── … ── first iteration ──► training
"""

import os
import time
from pathlib import Path


class StartClock:
    """The wall-clock time of the phases of a start, in seconds, in the order in which they end.

    The clock starts with this process: the first phase includes the interpreter and all imports.
    """

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._last = time.monotonic() - _age_of_process()
        self._is_over = False

    def ends(self, phase: str) -> None:
        """A phase ends now; a phase that ends several times is the sum of its parts. Ignored after `finish`."""
        now = time.monotonic()
        if not self._is_over:
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def finish(self, phase: str) -> str | None:
        """The last phase ends now: the start as one line of text; None if it was over already."""
        if self._is_over:
            return None
        self.ends(phase)
        self._is_over = True
        parts = [f"{name} {seconds:.1f}" for name, seconds in self._phases.items() if seconds >= 0.05]
        return f"{sum(self._phases.values()):.1f} s ({', '.join(parts)})"


def _age_of_process() -> float:
    """Seconds since this process was started; 0 where the kernel does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    started = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return max(uptime - started, 0.0)


_START_TIME = 19
"""Place of `starttime` (proc(5)) among the fields after the command's name."""
