"""Processes within a budget of time, and where figures come from."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's __all__

from benchmarks.common import ROOT
from benchmarks.gpu.worker import Order, output_of
from megatron_dynapipe.processes import package_path


class NotRunError(Exception):
    """A check that could not be made; the message says why."""


class ProcessFailedError(Exception):
    """A process ended badly, or did not end in time; the message holds the end of its output.

    Attributes:
        figures: what is known all the same.
    """

    figures: Mapping[str, float | int | str] = {}


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that something may take from when this was made."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds, not below 0."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    def deadline(self) -> float:
        """On the monotonic clock, of what starts now; raises NotRunError when there are too few seconds to start."""
        if self.left < 5:
            raise NotRunError(f"no time left of {self.seconds:.0f} s")
        return self.began + self.seconds


class Shares:
    """A budget that checks share, each starting in its turn: what comes before starves none that comes after.

    Args:
        budget: of all of them.
        expected_s: what each is expected to take.
        side_by_side: how many run at a time.
        after_s: what is expected of those that run one by one after all of them.
    """

    def __init__(
        self, budget: Budget, expected_s: Iterable[float], *, side_by_side: int = 1, after_s: float = 0.0
    ) -> None:
        self._budget, self._side_by_side, self._after_s = budget, side_by_side, after_s
        self._expected_s = sum(expected_s)
        self._lock = threading.Lock()

    def take(self, expected_s: float) -> Budget:
        """The next check's: all that is left beyond what the later ones are expected to take; where that is less than
        its part of what is left, this part."""
        with self._lock:
            whole = self._expected_s / self._side_by_side + self._after_s
            self._expected_s -= expected_s
            left, later = self._budget.left, self._expected_s / self._side_by_side + self._after_s
        return Budget(max(left - later, left * min(1.0, expected_s / whole)))


class Processes:
    """Commands side by side, each in a session of its own, with files for its output.

    Args:
        commands: started now.
        environments: of each, besides this process's own.
        log: where the files are, by suffixes.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], *, environments: Sequence[Mapping[str, str]] | None = None, log: Path
    ) -> None:
        self._commands = commands
        self._files = [(log.with_suffix(f".{n}.out"), log.with_suffix(f".{n}.err")) for n in range(len(commands))]
        self._processes = []
        for number, (command, (output, errors)) in enumerate(zip(commands, self._files, strict=True)):
            environment = (
                os.environ | {"PYTHONPATH": package_path()} | dict(environments[number] if environments else {})
            )
            with output.open("w") as out, errors.open("w") as err:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )

    def tell(self, line: bytes) -> None:
        """Write a line to the standard input of each; one that has ended is found by `wait`."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                return

    def wait(self, deadline: float, done: Callable[[], bool] | None = None) -> None:
        """Until `done`, or without it until all have ended, whose standard inputs end now.

        Raises:
            ProcessFailedError: one failed, ended before `done`, or time ran out; all of them are gone then.
        """
        if done is None:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.close()
        try:
            while time.monotonic() < deadline:
                states = [process.poll() for process in self._processes]
                bad = [number for number, state in enumerate(states) if state not in (None, 0)]
                if bad:
                    raise self._failure(bad[0])
                if done is not None and done():
                    return
                if None not in states:
                    if done is None:
                        return
                    raise self._failure(0)
                time.sleep(0.05)
            raise self._failure(next(n for n, process in enumerate(self._processes) if process.poll() is None))
        except BaseException:
            self.kill()
            raise

    def outputs(self) -> list[str]:
        """What each has written to its standard output."""
        return [output.read_text() for output, _ in self._files]

    def kill(self) -> None:
        """End them, with everything that they have started."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _failure(self, number: int) -> ProcessFailedError:
        end = "".join(file.read_text() for file in self._files[number])[-2000:]
        status = self._processes[number].returncode
        ended = "did not end in time" if status is None else f"ended with {status}"
        return ProcessFailedError(f"{' '.join(self._commands[number])[:300]}\n{ended}:\n{end}")


def run(
    commands: Sequence[Sequence[str]],
    budget: Budget,
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    log: Path,
) -> list[str]:
    """Run commands side by side to their end; the standard output of each.

    Raises:
        ProcessFailedError: one failed, or time ran out; all of them are gone then.
        NotRunError: there is no time to start.
    """
    deadline = budget.deadline()
    processes = Processes(commands, environments=environments, log=log)
    processes.wait(deadline)
    return processes.outputs()


class Ranks:
    """The ranks of some layouts, by `worker.py`: they stay up from one order to the next.

    Args:
        words: the worker's command line.
        environments: of each rank.
        folder: for what they write.
    """

    def __init__(self, words: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path) -> None:
        self._count, self._orders, self._folder = len(environments), 0, folder
        self.processes = Processes([words] * self._count, environments=environments, log=folder / "rank")

    def carry_out(self, budget: Budget, **order: Any) -> list[Any]:
        """What every rank learned of an order; the arguments are `Order`'s, but for its output and port."""
        self._orders += 1
        # Kept while the order is carried out: ranks meet at a port that is bound, not at one that was free a while ago.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        whole = Order(output=str(self._folder / str(self._orders)), port=store.port, **order)
        files = [output_of(whole, rank) for rank in range(self._count)]
        deadline = budget.deadline()
        self.processes.tell(msgspec.json.encode(whole))
        self.processes.wait(deadline, lambda: all(file.exists() for file in files))
        return [torch.load(file, weights_only=True) for file in files]


def provenance(device: str) -> dict[str, object]:
    """What figures depend on: code, libraries, device, date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": _said(["git", "describe", "--always", "--dirty", "--abbrev=40"]) or _carried(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron": importlib.metadata.version("megatron-core"),
        "cores": os.cpu_count(),
        **(_gpu() if device == "cuda" else {"device": "cpu"}),
    }


def _gpu() -> dict[str, object]:
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _said(driver) if shutil.which(driver[0]) else "",
    }


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git, say, where the code was carried to
        return ""
    return done.stdout.strip()


def _carried() -> str:
    """The commit that `carry.sh` noted, since it brings no history."""
    note = ROOT / "COMMIT"
    return note.read_text().strip() if note.exists() else ""
