"""A headless Chromium, driven over its own protocol through pipes: what a page logs, asks for and answers.

Its messages are JSON texts that end with a zero byte (Chrome DevTools Protocol, `--remote-debugging-pipe`).
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-dev-shm-usage", "--window-size=1400,1200", "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of a Chromium: $CHROMIUM, which needs no root (an unpacked archive does), or one on the path."""
    given = os.environ.get("CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser of its own.

    Attributes:
        errors: what its scripts threw, and what was logged as an error.
        requests: addresses that it asked for.
    """

    def __init__(self, browser: str, file: Path, *, deadline_s: float = 120.0) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._browser, self._file = browser, file
        self._deadline = time.monotonic() + deadline_s
        self._number = 0
        self._unread = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", script, self._browser, *FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=self._file.resolve().as_uri())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Do one thing; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of the page's; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until an expression is true."""
        while not self.evaluate(expression):
            assert time.monotonic() < self._deadline, f"waited too long for {expression}; errors: {self.errors}"
            time.sleep(0.1)

    def mouse(self, kind: str, x: float, y: float, *, is_down: bool = False) -> None:
        """Move, press or release the mouse (`mouseMoved`, `mousePressed`, `mouseReleased`) at a point of the window."""
        button = "left" if is_down or kind != "mouseMoved" else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(is_down), clickCount=1)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = self._deadline - time.monotonic()
            assert left > 0 and select.select([self._in], [], [], left)[0], "the browser does not answer"
            read = os.read(self._in, 2**20)
            assert read, "the browser is gone"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
