"""What an agent and its ranks have in common: one record in the environment, exit statuses, a log of events."""

import os
import time
from pathlib import Path
from typing import Self

import msgspec

VARIABLE = "MEGATRON_DYNAPIPE_LAUNCH"
"""Environment variable by which ranks know that `launch` started them, and how."""
LEFT = 75
"""Exit status of a rank that has saved a checkpoint and left because the set of nodes changes."""
CANNOT_START = 2
"""Exit status of a rank that cannot run as it was asked to: starting it again does not help."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `launch` tells its ranks.

    Attributes:
        most_ranks: of the job, with all nodes there.
        wait_s: how long ranks wait for more of them where too few are there for any layout.
        emergency_every: iterations between two checkpoints against a loss without notice; 0 saves none; None finds how
            many keep within their share of the time (`pace`).
        exclude_slow: a rank that takes more than this factor of the median time for its passes leaves with its node at
            the next change; None only names it.
        slow_file: a rank that is too slow makes this file, for its agent.
        trains_file: a rank makes this file after its first iteration, for its agent.
        events: file to which events are appended; None keeps none.
    """

    most_ranks: int
    wait_s: float
    emergency_every: int | None
    exclude_slow: float | None
    slow_file: str
    trains_file: str | None = None
    events: str | None = None

    @classmethod
    def current(cls) -> Self | None:
        """Of the process that asks; None where `launch` did not start it."""
        text = os.environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def to_environment(self) -> None:
        """Let processes that this one starts find it."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def note_training(iteration: int) -> None:
    """Tell the agent, and the log of events, that this start has come to an iteration."""
    job = Job.current()
    if job is not None and job.trains_file is not None:
        Path(job.trains_file).touch()
    note("trains", iteration=iteration)


def note(event: str, **fields: str | float | int) -> None:
    """Append an event with the time to the job's log of events, if it keeps one."""
    job = Job.current()
    if job is None or job.events is None:
        return
    who = f"rank {os.environ['RANK']}" if "RANK" in os.environ else f"agent {os.getpid()}"
    line = msgspec.json.encode({"time": time.time(), "who": who, "event": event, **fields})
    with Path(job.events).open("ab") as file:  # one write of a short line: appended as a whole
        file.write(line + b"\n")
