"""Starting processes within a budget of time, and where figures come from."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.common import ROOT


class NotRunError(Exception):
    """A check that could not be made; the message says why."""


class ProcessFailedError(Exception):
    """A process ended badly, or did not end in time; the message holds the end of its output."""


@dataclass
class Budget:
    """Seconds that all checks together may take."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds for the next process; raises NotRunError when there are too few to start one."""
        left = self.seconds - (time.monotonic() - self.began)
        if left < 5:
            raise NotRunError(f"no time left of {self.seconds:g} s")
        return left


def run(
    commands: Sequence[Sequence[str]],
    budget: Budget,
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    log: Path,
) -> str:
    """Run commands side by side to their end; the standard output of the first.

    Raises:
        ProcessFailedError: one failed, or time ran out; all of them are gone then.
        NotRunError: there is no time to start.
    """
    deadline = time.monotonic() + budget.left()
    processes, files = [], []
    for number, command in enumerate(commands):
        output, errors = log.with_suffix(f".{number}.out"), log.with_suffix(f".{number}.err")
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environments[number] if environments else {})
        with output.open("w") as out, errors.open("w") as err:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True)
            )
        files.append((output, errors))
    try:
        failed = _wait(processes, deadline)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its own session, so with everything it has started
                process.wait()
    if failed is not None:
        end = (files[failed][0].read_text() + files[failed][1].read_text())[-2000:]
        status = processes[failed].returncode
        raise ProcessFailedError(f"{' '.join(commands[failed])[:300]}\nended with {status}:\n{end}")
    return files[0][0].read_text()


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """The first process that failed or was late; None if all ended well."""
    while time.monotonic() < deadline:
        states = [process.poll() for process in processes]
        bad = [number for number, state in enumerate(states) if state not in (None, 0)]
        if bad:
            return bad[0]
        if None not in states:
            return None
        time.sleep(0.05)
    return next(number for number, process in enumerate(processes) if process.poll() is None)


def provenance(device: str) -> dict[str, object]:
    """What figures depend on: code, libraries, device, date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": _said(["git", "rev-parse", "HEAD"]),
        "uncommitted": bool(_said(["git", "status", "--porcelain"])),
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
