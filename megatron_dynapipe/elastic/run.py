"""A user's own training loop on ranks that come and go: resumed, saved for every layout, left on notice.

run = ElasticRun("/shared/run7", pipeline)                   loads the last checkpoint, whatever layout saved it
for iteration in run.iterations(10_000):                     after each one ranks agree on whether one had a notice
    loss, _ = pipeline.step(batch_of(iteration))
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from megatron_dynapipe.elastic import rounds
from megatron_dynapipe.elastic.job import LEFT, Job, note, note_training
from megatron_dynapipe.elastic.pace import SavePace
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.runtime.control_group import ControlGroup

_PREFIX = "iteration_"
_NOTICES = (signal.SIGTERM, signal.SIGUSR1)


class Saved(Protocol):
    """What is trained: a `Pipeline`, or anything whose `save` every rank calls, and whose `load` takes any layout's."""

    def save(self, path: str | Path) -> None:
        """Write all state into a folder that does not exist."""

    def load(self, path: str | Path) -> None:
        """Go on from such a folder."""


class ElasticRun:
    """Counts a run's iterations over all its starts. Every rank makes it at the same point: it makes a process group.

    It takes SIGTERM and SIGUSR1 as a notice that this rank goes: all ranks finish the iteration and save, and the
    process ends, with the status by which `launch` knows that it left (0 where something else started it).

    Args:
        folder: for checkpoints, which all nodes see. The last complete one is loaded and kept.
        pipeline: what is trained, over the ranks of the process group.
        save_every: iterations between two checkpoints; 0 saves on notice and at the end alone. By default what
            `launch --emergency-every` says, else 50, doubled until saving is 2% of the time (`pace`).
        timeout_s: deadline of every exchange between ranks, longer than ranks are apart after a step or a save.

    Attributes:
        iteration: the next one: how many have been trained.

    Raises:
        DataError: on every rank: the checkpoint is of another model or optimizer.
        ConfigError: on every rank: the folder cannot be written to.
    """

    def __init__(
        self, folder: str | Path, pipeline: Saved, *, save_every: int | None = None, timeout_s: float = 300.0
    ) -> None:
        self._job = Job.current()
        by_default = None if self._job is None else self._job.emergency_every
        self._every = by_default if save_every is None else save_every
        self._pace, self._began = SavePace(), 0.0
        self._folder, self._pipeline = Path(folder), pipeline
        self._control = ControlGroup(timeout_s=timeout_s)
        self._heard, self._process, self._fresh = False, os.getpid(), True
        self._handlers = {number: signal.signal(number, self._hear) for number in _NOTICES}
        self.iteration = self._resume()

    def iterations(self, until: int) -> Iterator[int]:
        """Numbers of the iterations that are left, each to be trained before the next is asked for.

        After the last one the run is saved, and has ended.

        Args:
            until: iterations of the whole run.
        """
        while self.iteration < until:
            self._began = time.monotonic()
            yield self.iteration
            self.iteration += 1
            self._after_iteration(is_last=self.iteration == until)
        self.end()

    def end(self) -> None:
        """Say that the run has ended; for a loop that is left early, which may `save` before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._control.rank == 0:
            rounds.tell_end()

    def save(self) -> None:
        """Write a checkpoint, and remove the one before once it is complete; every rank calls it."""
        name = _name(self.iteration)
        fresh = self._folder / f"{name}.unfinished"
        self._on_rank_0(lambda: _make_room(self._folder, fresh))
        self._pipeline.save(fresh)
        self._on_rank_0(lambda: _complete(fresh, self._folder / name))

    def _resume(self) -> int:
        """Load the last checkpoint; its iteration, 0 without one."""
        name = self._control.broadcast_text(_last(self._folder) if self._control.rank == 0 else "")
        if not name:
            return 0
        self._pipeline.load(self._folder / name)
        note("loaded")
        return int(name.removeprefix(_PREFIX))

    def _after_iteration(self, *, is_last: bool) -> None:
        if self._fresh:
            self._fresh = False
            note_training(self.iteration)
        leaves = bool(self._control.start_sum(torch.tensor([int(self._heard)]))().item()) and not is_last
        if leaves:
            note("agreed")
        self._pace.trained(time.monotonic() - self._began)
        every = self._pace.every if self._every is None else self._every
        if leaves or is_last:
            self.save()
        elif every and self.iteration % every == 0:
            self._save_in_time()
        if leaves:
            self._leave()

    def _save_in_time(self) -> None:
        """Save, and have rank 0 say how many iterations the next is away where nobody else does."""
        began = time.monotonic()
        self.save()
        if self._every is not None:
            return
        if self._pace.saved(time.monotonic() - began) and self._control.rank == 0:
            print(self._pace, flush=True)
        self._pace.every = int(self._control.broadcast_text(str(self._pace.every)))

    def _leave(self) -> NoReturn:
        note("saved")
        if self._control.rank == 0:
            print(f"saved iteration {self.iteration} and left, on notice", flush=True)
        sys.exit(0 if self._job is None else LEFT)

    def _hear(self, number: int, frame: Any) -> None:
        if os.getpid() == self._process:
            self._heard = True
            return
        signal.signal(number, signal.SIG_DFL)  # a worker that this process started, to which the signal means its end
        os.kill(os.getpid(), number)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Do something to files on rank 0 before any rank goes on; an error of the system's is raised on all."""

        def act() -> None:
            if self._control.rank == 0:
                try:
                    action()
                except OSError as error:
                    raise ConfigError(
                        f"cannot write checkpoints to {self._folder}: {error.strerror}",
                        hint="give a folder that all nodes may write to",
                    ) from error

        self._control.run_on_all(act)


def _name(iteration: int) -> str:
    return f"{_PREFIX}{iteration:07d}"


def _last(folder: Path) -> str:
    """Name of the complete checkpoint of the highest iteration; empty if there is none."""
    numbers = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*") if path.is_dir()]
    found = [int(number) for number in numbers if number.isdecimal()]
    return _name(max(found)) if found else ""


def _make_room(folder: Path, fresh: Path) -> None:
    """Remove what ranks began to save and did not complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_PREFIX}*.unfinished"):
        shutil.rmtree(path)
    assert not fresh.exists()


def _complete(fresh: Path, path: Path) -> None:
    """Give a checkpoint its name, and remove the others."""
    if path.exists():  # the same iteration, saved again by hand
        shutil.rmtree(path)
    fresh.replace(path)
    for other in path.parent.glob(f"{_PREFIX}*"):
        if other != path:
            shutil.rmtree(other, ignore_errors=True)
