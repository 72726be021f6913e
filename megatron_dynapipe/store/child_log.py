"""What a child process prints: to a file, or to one without a name that vanishes with its last reader."""

import logging
import os
import tempfile
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64_000


class ChildLog:
    """A file for a child's stdout and stderr whose last lines can be quoted when the child dies."""

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`; without one, or where a full disk has no room for it, to an unnamed temporary file."""
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
            return path.open("a+b")
        except OSError as error:
            logger.warning("cannot write %s, and go on without: %s", path, error)
    return tempfile.TemporaryFile()
