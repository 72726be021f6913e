"""Starting and ending child processes. Only the standard library: this file is a program, too (see `main`).

    start            a child with a session of its own: its input through a pipe that stays open, its output to a log
    start_guarded    the same for a program that does not end with its stdin: a guard between ends it
    run_guarded      such a program to its end, with a deadline
    terminate        SIGTERM and, after a deadline, SIGKILL
    importing        around the imports of a program, which a collection of garbage would slow down

A child never outlives this process, however this one ends: the pipe ends with it. Ranks end with their launcher
(`end_with_launcher`): Linux only.
"""

import atexit
import ctypes
import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

GUARD_TIMEOUT_S = 5.0
"""How long a guard waits for its program to end after SIGTERM."""
_TAIL_BYTES = 64_000
_PR_SET_PDEATHSIG = 1


class ChildLog:
    """A file for a child's stdout and stderr whose last lines can be quoted when the child dies."""

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`; without one, or where it cannot be opened, to an unnamed temporary file."""
        self.file = _open(path)
        self._start = os.fstat(self.file.fileno()).st_size

    def tail(self, lines: int = 20) -> str:
        """The last lines printed so far (nothing from before this log was opened)."""
        if self.file.closed:
            return ""
        end = os.fstat(self.file.fileno()).st_size
        start = max(self._start, end - _TAIL_BYTES)
        # pread: the child writes at the position that this description shares with it.
        text = os.pread(self.file.fileno(), end - start, start).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """Stop reading; the child may go on writing."""
        self.file.close()


def _open(path: Path | None) -> IO[bytes]:
    if path is not None:
        try:
            file = path.open("a+b")
            if os.fstatvfs(file.fileno()).f_bavail:
                return file
            file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            logger.warning("cannot write %s, and go on without: %s", path, error)
    return tempfile.TemporaryFile()


def start(
    command: Sequence[str | os.PathLike[str]],
    *,
    log: ChildLog,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own: a Ctrl-C in the terminal is for this process to handle.

    Args:
        command: program and arguments.
        log: takes its stdout and stderr.
        stdin: written to its stdin, which then stays open: settings and secrets, which never go through arguments or
            the environment. A child that reads to the end learns that this process has ended.
        env: its environment; None for this process's.
        cwd: its working folder; None for this process's.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log.file,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died while starting: its exit status and log say why
        process.stdin.write(stdin)
        process.stdin.flush()
    return process


def start_guarded(
    command: Sequence[str | os.PathLike[str]],
    *,
    log: ChildLog,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program that does not end with its stdin, below a guard that does and that has its exit status.

    The program reads `stdin` whole and is killed by the kernel (Linux) when its guard is.
    """
    order = json.dumps({"command": [os.fspath(word) for word in command], "stdin": stdin}).encode() + b"\n"
    return start([sys.executable, "-I", "-S", __file__], log=log, stdin=order, env=env, cwd=cwd)


def run_guarded(
    command: Sequence[str | os.PathLike[str]], *, deadline_s: float, env: Mapping[str, str] | None = None
) -> tuple[int | None, list[str]]:
    """Run a program to its end; its exit status, None if the deadline came first, and the lines of its output.

    Processes that it started end with it.
    """
    log = ChildLog()
    process = start_guarded(command, log=log, env=env)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(deadline_s)
        status = process.returncode
    finally:
        terminate(process, 2 * GUARD_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log.file.seek(0)
        lines = log.file.read().decode(errors="replace").splitlines()
        log.close()
    return status, lines


def terminate(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Close a child's stdin and send SIGTERM, after so many seconds SIGKILL; its exit status. It may have ended."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it died with part of its input unread
            process.stdin.close()
    process.terminate()  # a forked child of ours may still hold the pipe open
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def package_path() -> str:
    """PYTHONPATH for a child that imports this package: its folder, then what this process was given."""
    root = str(Path(__file__).parents[1])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of many modules: no garbage is collected, and what is there at the end is never looked through.

    Nearly all objects of modules stay, and they come by the million: looking through them again and again took a sixth
    of the time in which PyTorch and Megatron are imported. Only at its end does this process look through them:
    otherwise Triton's nanobind would print a page of what it takes for leaks.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()


def set_parent_death_signal(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread that started it ends; nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def end_with_launcher(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this rank once torchrun has ended, by SIGKILL too.

    Nothing happens under another launcher: a rank that a shell started in the background may outlive the shell.

    Between the rank's start and this call its launcher may have ended already. Then the parent is another process by
    now, or was when it was first asked for; in that case the rank has no peers to meet and ends by its timeout.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    set_parent_death_signal(number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def main() -> None:
    """The guard: reads an order from stdin, a line of JSON, and runs its command until that ends or stdin does.

    The order is {"command": […], "stdin": "…"}. stdin ends when the owner closes it or dies; SIGTERM ends the program,
    too. When the program ends by itself, so does the guard, with its exit status (128 + signal if it was killed).
    """
    order = json.loads(sys.stdin.buffer.readline())
    program = subprocess.Popen(
        order["command"], stdin=subprocess.PIPE, preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL)
    )
    assert program.stdin is not None
    with program.stdin as pipe:
        pipe.write(order["stdin"].encode())
    # As a shell has it, for a program that was killed.
    threading.Thread(
        target=lambda: os._exit(status if (status := program.wait()) >= 0 else 128 - status), daemon=True
    ).start()
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    sys.stdin.buffer.read()  # returns when the owner is gone
    program.terminate()
    time.sleep(GUARD_TIMEOUT_S)  # the thread above ends this process as soon as the program has ended
    program.kill()
    time.sleep(GUARD_TIMEOUT_S)


if __name__ == "__main__":
    main()
