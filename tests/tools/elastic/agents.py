"""Nodes of a job on this machine, for tests: torchrun's agents with one rank each."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil

DEADLINE_S = 300.0
"""Of every wait; on a quiet machine none takes more than a minute."""
LAST_CALL_S = 45
"""How long the first start waits for the second node, which cannot come later where nodes do not join."""
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Nodes:
    """A job whose nodes are started one by one; all of them are ended with the block.

    Nodes can come later if it `joins`, which torchrun's shared store does not allow (docs/reliability.md).
    """

    def __init__(self, folder: Path, port: int, *, most: int, script: Sequence[str], joins: bool = False) -> None:
        self.folder, self._port = folder, port
        self._flags = ["--nnodes", f"1:{most}", "--max-restarts", "100", "--rdzv-backend", "c10d"]
        self._flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "1"]
        self._flags += ["--rdzv-conf", f"last_call_timeout={5 if joins else LAST_CALL_S}"]
        self._script, self._joins = script, joins
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._started:
            if agent.poll() is None:
                kill(agent)
            agent.wait(DEADLINE_S)

    def start(self) -> subprocess.Popen[bytes]:
        """One more node; its output goes to `said`. Returns once the first one hosts the rendezvous."""
        argv = [sys.executable, "-m", "torch.distributed.run", *self._flags, *self._script]
        with (self.folder / f"agent-{len(self._started)}").open("wb") as file:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
            environment |= {"OMP_NUM_THREADS": "1"} | ({SHARED_STORE: "1"} if self._joins else {})
            self._started.append(subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=environment))
        self.until(self._is_hosted, "a rendezvous")
        return self._started[-1]

    def _is_hosted(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def said(self, node: int) -> str:
        return (self.folder / f"agent-{node}").read_text()

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            said = "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent-*")))
            assert time.monotonic() < deadline, f"expected {what} within {DEADLINE_S:.0f} s:\n{said}"
            time.sleep(0.1)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
        process.kill()
