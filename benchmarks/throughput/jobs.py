"""The processes of the throughput benchmark's methods, driven over a socket in lines of JSON."""

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import environment, torchrun
from benchmarks.throughput.methods import Spec

START_S, BATCH_S = 240.0, 600.0
"""Deadlines: of a job's start, and of one batch."""


class Job:
    """The processes of one method, and the connection to their rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw")
        self.hello = self._read()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Have one command run; its answer."""
        print(json.dumps(command), file=self._file, flush=True)
        return self._read()

    def close(self) -> None:
        """Let the processes end."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise SystemExit("a job ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def started(spec: Spec) -> Iterator[Job]:
    """A method's processes, up and waiting for commands; ended with the block. The port is chosen here."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1.0)
        path = Path(folder) / "spec.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(spec, port=server.getsockname()[1])))
        command = [*torchrun(spec.ranks), "-m", "benchmarks.throughput.worker", str(path)]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        try:
            connection = _accepted(server, process, spec.method)
            connection.settimeout(BATCH_S)
            job = Job(connection)
            try:
                yield job
            finally:
                job.close()
                connection.close()
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


def _accepted(server: socket.socket, process: subprocess.Popen[bytes], method: str) -> socket.socket:
    """The connection of a job's rank 0, unless the job ends before."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]
        if process.poll() is not None:
            raise SystemExit(f"the job of {method} ended with status {process.returncode}; its error is above")
    raise SystemExit(f"the job of {method} did not start within {START_S:.0f} s")
