"""What an agent and its ranks share: one record in the environment, exit statuses."""

import os
from pathlib import Path
from typing import Self

import msgspec

VARIABLE = "MEGATRON_DYNAPIPE_LAUNCH"
"""Environment variable by which ranks know that `launch` started them, and how."""
LEFT = 75
"""Exit status of a rank that has saved a checkpoint and left because the set of nodes changes."""
CANNOT_START = 2
"""Exit status of a rank that cannot run as it was asked to: starting it again does not help."""
SAVE_EVERY = 50
"""Iterations between two emergency checkpoints by default."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `launch` passes to its ranks.

    Attributes:
        most_ranks: of the job, with all nodes there.
        wait_s: how long ranks wait for more of them where too few are there for any layout.
        emergency_every: iterations between two checkpoints against a loss without notice; 0 saves none.
        trains_file: a rank makes this file after its first iteration, for its agent.
    """

    most_ranks: int
    wait_s: float
    emergency_every: int = SAVE_EVERY
    trains_file: str | None = None

    @classmethod
    def current(cls) -> Self | None:
        """Of the process that asks; None where `launch` did not start it."""
        text = os.environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def to_environment(self) -> None:
        """Let processes that this one starts find it."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def note_training() -> None:
    """Let the agent know that this start has completed an iteration."""
    job = Job.current()
    if job is not None and job.trains_file is not None:
        Path(job.trains_file).touch()
