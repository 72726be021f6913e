"""A user's own training loop on ranks that come and go: resumed, saved for every layout, left on notice.

run = ElasticRun("/shared/run7", pipeline)                   loads the last checkpoint, whatever layout saved it
for iteration in run.iterations(10_000):                     after each one ranks agree on whether one had a notice
    loss, _ = pipeline.step(batch_of(iteration))
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.outputs import LOCK_SHARE
from megatron_dynapipe.processes import end_with_launcher
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.tools.elastic.run_folder import RunFolder, iteration_of

LEFT = 75
"""Exit status of a rank that saved a checkpoint and left on notice: torchrun starts the ranks of other nodes anew."""
SAVE_EVERY = 50
"""Iterations between two checkpoints against losses without notice, by default."""
_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


class Saved(Protocol):
    """A state: a `Pipeline`, or anything whose `save` every rank calls, and whose `load` takes any layout's."""

    def save(self, path: str | Path) -> None:
        """Write all state into a folder that does not exist."""

    def load(self, path: str | Path) -> None:
        """Go on from such a folder."""


class ElasticRun:
    """Counts a run's iterations over all its starts. Every rank makes it at the same point: it makes a process group.

    It takes SIGTERM and SIGUSR1 as a notice that this rank goes: all ranks finish the iteration and save, and the
    process ends, under torchrun with status 75, by which its agents start the ranks that stay anew. A rank whose agent
    is killed is killed too.

    Args:
        folder: for checkpoints, which all nodes see. The last complete one is loaded and kept; those before it that
            this run made are deleted, and nothing else is. One run at a time saves to it.
        pipeline: what is trained, over the ranks of the process group.
        save_every: iterations between two checkpoints; 0 saves on notice and at the end alone.
        timeout_s: deadline of every exchange between ranks, longer than ranks are apart after a step or a save.

    Attributes:
        iteration: the next one: how many have been trained.

    Raises:
        DataError: on every rank: the checkpoint is of another model or optimizer.
        ConfigError: on every rank: the folder cannot be written to, or another run saves to it.
    """

    def __init__(
        self, folder: str | Path, pipeline: Saved, *, save_every: int = SAVE_EVERY, timeout_s: float = 300.0
    ) -> None:
        end_with_launcher(signal.SIGKILL)
        self._every, self._folder, self._pipeline = save_every, RunFolder(Path(folder)), pipeline
        self._control = ControlGroup(timeout_s=timeout_s)
        self._has_notice, self._process = False, os.getpid()
        self._handlers = {number: signal.signal(number, self._take_notice) for number in _NOTICES}
        name = self._on_rank_0(lambda: self._folder.open(wait_s=timeout_s * LOCK_SHARE))
        if name:
            self._pipeline.load(self._folder.path / name)
        self.iteration = iteration_of(name) if name else 0

    def iterations(self, until: int) -> Iterator[int]:
        """Numbers of the iterations that are left, each to be trained before the next is asked for.

        After the last one the run is saved, and has ended.
        """
        while self.iteration < until:
            yield self.iteration
            self.iteration += 1
            self._after_iteration(is_last=self.iteration == until)
        self.end()

    def end(self) -> None:
        """Take no more notices; for a loop that is left early, which may `save` before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def save(self) -> None:
        """Write a checkpoint, and delete this run's one before once it is complete; every rank calls it."""
        fresh = Path(self._on_rank_0(lambda: str(self._folder.begin(self.iteration))))
        self._pipeline.save(fresh)
        self._on_rank_0(lambda: self._folder.complete(fresh, self.iteration))

    def _after_iteration(self, *, is_last: bool) -> None:
        leaves = bool(self._control.start_sum(torch.tensor([int(self._has_notice)]))().item()) and not is_last
        if leaves or is_last or (self._every and self.iteration % self._every == 0):
            self.save()
        if leaves:
            self._leave()

    def _leave(self) -> NoReturn:
        if self._control.rank == 0:
            print(f"saved iteration {self.iteration} and left, on notice", flush=True)
        sys.exit(LEFT if "TORCHELASTIC_RUN_ID" in os.environ else 0)

    def _take_notice(self, number: int, frame: Any) -> None:
        if os.getpid() == self._process:
            self._has_notice = True
            return
        signal.signal(number, signal.SIG_DFL)  # a worker that this process started, to which the signal means its end
        os.kill(os.getpid(), number)

    def _on_rank_0(self, action: Callable[[], str | None]) -> str:
        """Do something to files on rank 0; what it returns, on all ranks, which raise if it fails."""

        def act() -> str:
            if self._control.rank != 0:
                return ""
            try:
                return action() or ""
            except OSError as error:
                raise ConfigError(
                    f"cannot write checkpoints to {self._folder.path}: {error.strerror}",
                    hint="give a folder that all nodes may write to",
                ) from error

        return self._control.broadcast_text(self._control.run_on_all(act))
