"""Nodes of a job on this machine, for tests: agents of `launch` over a folder in which toy ranks write a log."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil
from megatron_dynapipe.elastic.rendezvous import KEY_VARIABLE

TOY = Path(__file__).parent / "toy_ranks.py"
DEADLINE_S = 240.0
"""Of every wait; on a quiet machine none takes more than a few seconds."""


class Nodes:
    """A job whose nodes are started one by one; all of them are ended with the block.

    Args:
        folder: of the job.
        port: of its rendezvous.
        least, most: its nodes.
        script: the training script and its arguments; by default toy ranks over the folder.
        host: address of the rendezvous.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        *,
        least: int,
        most: int,
        script: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.folder, self._port, self._nodes = folder, port, f"{least}:{most}"
        self._endpoint = f"{host}:{port}"
        self._script = script or (str(TOY), str(folder))
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._started:
            if agent.poll() is None:
                kill(agent)
            agent.wait(DEADLINE_S)

    def start(
        self, *flags: str, address: str | None = "127.0.0.1", before: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """One more node, at an address, with a command before its own; its output goes to `said`."""
        argv = [*before, sys.executable, "-m", "megatron_dynapipe", "launch"]
        argv += ["--nnodes", self._nodes, "--nproc-per-node", "1"]
        argv += ["--rdzv-endpoint", self._endpoint, "--last-call", "1"]
        argv += [] if address is None else ["--local-addr", address]
        argv += ["--join-timeout", "60", *flags, *self._script]
        with (self.folder / f"agent-{len(self._started)}").open("wb") as file:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
            environment.setdefault(KEY_VARIABLE, "a key for tests alone")
            agent = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=environment)
        self._started.append(agent)
        return agent

    def said(self, node: int) -> str:
        return (self.folder / f"agent-{node}").read_text()

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def await_host(self) -> None:
        """Until the first node hosts the rendezvous: otherwise another might, and end it when it leaves."""

        def answers() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                return False
            return True

        self.until(answers, "a rendezvous")

    def await_starts(self, world: int, rounds: int = 1) -> None:
        """Until ranks of a world of this size have all started, in so many rounds."""
        starts = [f"start {rank}/{world}" for rank in range(world)]
        self.until(lambda: all(self.log().count(start) >= rounds for start in starts), f"{world} ranks")

    def end(self) -> list[int]:
        """End the run well; the agents' exit statuses."""
        (self.folder / "end").touch()
        return [agent.wait(DEADLINE_S) for agent in self._started]

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(int((self.folder / f"pid-{rank}").read_text()), number)

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            said = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("agent-*")))
            assert time.monotonic() < deadline, f"expected {what} within {DEADLINE_S:.0f} s: {self.log()}\n{said}"
            time.sleep(0.1)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
        process.kill()
