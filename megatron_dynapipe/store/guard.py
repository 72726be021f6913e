"""Runs a server for as long as the process that asked for it lives: `python guard.py`, an order on stdin.

The order is one line of JSON, `{"command": [...], "stdin": "..."}`: what to run and what to feed it (settings and
secrets come this way, never through arguments or the environment). After that line nothing more is sent: stdin ends
when the owner closes it or dies, however it dies, and then the server is stopped; SIGTERM stops it too. When the
server ends by itself, so does the guard, with its exit status. On Linux the kernel also kills the server when the
guard is killed.

Only the standard library, so that it starts in a few hundredths of a second under `python -I -S`.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the ordered command until it ends or stdin does."""
    order = json.loads(sys.stdin.buffer.readline())
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    server = subprocess.Popen(
        order["command"],
        stdin=subprocess.PIPE,
        preexec_fn=prctl and (lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)),
    )
    assert server.stdin is not None
    with server.stdin as pipe:
        pipe.write(order["stdin"].encode())
    threading.Thread(target=lambda: os._exit(_status(server.wait())), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    sys.stdin.buffer.read()  # returns when the owner is gone
    server.terminate()
    time.sleep(STOP_TIMEOUT_S)  # the thread above ends this process as soon as the server has ended
    server.kill()
    time.sleep(STOP_TIMEOUT_S)


def _status(returncode: int) -> int:
    """A shell's exit status for a child's return code (128 + signal)."""
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    main()
