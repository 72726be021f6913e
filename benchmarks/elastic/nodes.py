"""Nodes of one job on this machine: agents of `launch` with one rank each, and what they have logged."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from benchmarks.common import ROOT
from tests.elastic.agents import kill
from tests.helpers.entry_scripts import SMALL, TRAINING
from tests.store.servers import free_port

FLAGS = (
    f"{TRAINING} --global-batch-size 24 --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --dynapipe-calibrate 0 --dynapipe-timeout-s 900 --dynapipe-device cpu "
    "--dynapipe-long-samples truncate --train-iters 1000000 --save-interval 1000000"
)
LINE = re.compile(r"\[([\d-]+ [\d:.]+)\] iteration +(\d+)/.*?consumed samples: +(\d+) .*?lm loss: ([0-9.E+-]+)")
STARTED = re.compile(r"launch: \d+ nodes, (\d+) ranks")
DEADLINE_S = 1500.0
"""Of whatever is waited for; an event is expected to take much less on a quiet machine."""


class ITERATION(NamedTuple):
    """One that was logged."""

    time: str
    number: int
    consumed: int
    loss: float

    def ended(self) -> float:
        """When, in seconds since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Attributes:
        model: gpt or t5.
        data: dataset folder.
        nodes: at most.
        every: iterations between emergency checkpoints.
    """

    model: str
    data: Path
    nodes: int
    every: int


class Cluster:
    """One run of a job; all its processes end with the block.

    Args:
        job: what is trained.
        folder: for its checkpoints, logs and records.
        iterations: after which it ends; None trains until `end`.
    """

    def __init__(self, job: Job, folder: Path, *, iterations: int | None) -> None:
        folder.mkdir()
        self.job, self._folder, self._iterations = job, folder, iterations
        self._agents: list[subprocess.Popen] = []
        self._logs: list[Path] = []
        self._going: set[int] = set()
        self._port = free_port()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left_over()

    def start(self, nodes: int) -> None:
        """That many more nodes."""
        flags = ["--nnodes", f"1:{self.job.nodes}", "--nproc-per-node", "1", "--last-call", "3"]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--emergency-every", str(self.job.every)]
        more = [] if self._iterations is None else ["--exit-interval", str(self._iterations)]
        for _ in range(nodes):
            self._logs.append(self._folder / f"node-{len(self._logs)}.log")
            self._agents.append(start_agent(self.job, self._folder, self._logs[-1], flags, more))
            self._await_host()

    def _await_host(self) -> None:
        """Until the first node hosts the rendezvous: otherwise another might, and leave with it."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self._agents) == 1:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return
            self._check(deadline, "a rendezvous")
            time.sleep(0.1)

    def send_away(self, draw: random.Random, nodes: int) -> None:
        """A notice to nodes other than the first."""
        for agent in self._drawn(draw, nodes):
            agent.send_signal(signal.SIGUSR1)

    def kill_nodes(self, draw: random.Random, nodes: int) -> None:
        """As if their machines had lost power."""
        for agent in self._drawn(draw, nodes):
            kill(agent)
            agent.wait()

    def kill_rank(self, draw: random.Random) -> None:
        """One rank of any node, whose agent lives."""
        kill_ranks(draw.choice(self._alive()))

    def kill_while_saving(self) -> None:
        """Every rank, as soon as an emergency checkpoint has been begun that is not complete."""
        folder, deadline = self._folder / "saved" / "non_persistent", time.monotonic() + DEADLINE_S
        while number_in(folder / ".dynapipe-saving") <= number_in(folder / "latest_checkpointed_iteration.txt"):
            self._check(deadline, "an emergency checkpoint")
            time.sleep(0.001)
        for agent in self._alive():
            kill_ranks(agent)

    def _drawn(self, draw: random.Random, nodes: int) -> list[subprocess.Popen]:
        drawn = draw.sample([agent for agent in self._alive() if agent is not self._agents[0]], nodes)
        self._going |= {agent.pid for agent in drawn}
        return drawn

    def _alive(self) -> list[subprocess.Popen]:
        return [agent for agent in self._agents if agent.poll() is None]

    def running(self) -> int:
        """Nodes that are there and stay."""
        return sum(agent.pid not in self._going for agent in self._alive())

    def ranks(self) -> int:
        """Of the last rendezvous."""
        found = STARTED.findall(self._logs[0].read_text())
        return int(found[-1]) if found else 0

    def await_resumed(self, since: float, *, wanted: int) -> ITERATION:
        """The first iteration on that many ranks which ended after `since`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for log in self._logs:
                for start in re.split(r"(?=launch: \d+ nodes)", log.read_text())[1:]:
                    found = [line for line in lines_of(start) if line.ended() > since]
                    if found and STARTED.findall(start) == [str(wanted)]:
                        return found[0]
            self._check(deadline, f"an iteration on {wanted} ranks")
            time.sleep(0.1)

    def await_iterations(self, more: int) -> None:
        """Until that many more have been trained."""
        deadline, goal = time.monotonic() + DEADLINE_S, self.last_iteration() + more
        while self.last_iteration() < goal:
            self._check(deadline, f"iteration {goal}")
            time.sleep(0.1)

    def await_end(self) -> None:
        """Until every node has ended, and well unless it was to go."""
        for agent in self._agents:
            if (status := agent.wait(DEADLINE_S)) and agent.pid not in self._going:
                raise SystemExit(f"expected a node to end well, got status {status}:\n{self._said()}")

    def end(self) -> int:
        """Send all nodes away; the last iteration."""
        for agent in self._alive():
            agent.send_signal(signal.SIGTERM)
        for agent in self._agents:
            agent.wait(DEADLINE_S)
        return self.last_iteration()

    def left_over(self) -> int:
        """How many processes of this job there still are; ends them."""
        left = [process for process in psutil.process_iter() if self._is_ours(process)]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return len(left)

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            ours = str(self._folder)
            return ours in process.environ().get("MEGATRON_DYNAPIPE_LAUNCH", "") or ours in " ".join(process.cmdline())
        return False

    def lines(self) -> list[ITERATION]:
        """All that was logged, by time."""
        return sorted(line for log in self._logs for line in lines_of(log.read_text()))

    def losses(self) -> dict[int, ITERATION]:
        """The last time that each iteration was trained."""
        return {line.number: line for line in self.lines()}

    def last_iteration(self) -> int:
        return max((line.number for line in self.lines()), default=0)

    def _check(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline or not self._alive():
            raise SystemExit(f"expected {what} within {DEADLINE_S:.0f} s, got:\n{self._said()}")

    def _said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self._logs)


def start_agent(
    job: Job, folder: Path, log: Path, flags: Sequence[str], more: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """An agent of `launch`, with flags of its own and more of the run's; both write to a log."""
    argv = [sys.executable, "-m", "megatron_dynapipe", "launch", *flags, "--save-timeout", "900"]
    argv += [f"pretrain_{job.model}_multitask.py", *SMALL[job.model].split(), *FLAGS.split()]
    argv += ["--dynapipe-data", str(job.data), "--save", str(folder / "saved")]
    argv += ["--dynapipe-report-dir", str(folder / "report"), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    with log.open("w") as file:
        return subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)


def kill_ranks(agent: subprocess.Popen) -> None:
    for process in psutil.Process(agent.pid).children():
        if "multitask.py" in " ".join(process.cmdline()):
            process.kill()


def number_in(path: Path) -> int:
    """0 where there is none."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def lines_of(log: str) -> Iterator[ITERATION]:
    """Iterations of a log; Megatron's second line after a start is the mean of two."""
    for start in log.split("launch: ")[1:]:
        first = 0.0
        for place, found in enumerate(LINE.finditer(start)):
            loss = float(found[4])
            first = loss if place == 0 else first
            yield ITERATION(found[1], int(found[2]), int(found[3]), 2 * loss - first if place == 1 else loss)
