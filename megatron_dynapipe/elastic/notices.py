"""Notices that a node goes, besides signals: a file that appears, a command that succeeds, a machine list.

Every source is asked by the agent between two looks at its ranks, at most once in `every_s`.
"""

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dynapipe.errors import ConfigError

_COMMAND_S = 10.0
"""Within which a preemption command must have ended; one that has not says nothing."""


class Notices:
    """Why this node should leave, if it should.

    Args:
        notice_file: the node leaves once it exists.
        command: the node leaves once it ends with status 0.
        machine_list: the node leaves once this file does not name it.
        names: under which a machine list may name this node.
        every_s: time between two looks.
        clock: gives seconds.

    Raises:
        ConfigError: the machine list cannot be read, or the command is no command.
    """

    def __init__(
        self,
        *,
        notice_file: Path | None = None,
        command: str | None = None,
        machine_list: Path | None = None,
        names: frozenset[str] = frozenset(),
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._machines, self._names = notice_file, machine_list, names
        self._command = None if command is None else _split(command)
        self._every_s, self._clock = every_s, clock
        self._next = clock()
        if machine_list is not None:
            read_machines(machine_list)

    def look(self) -> str | None:
        """Why this node should leave now; None if nothing says so, or the last look was a moment ago."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + self._every_s
        if self._file is not None and self._file.exists():
            return f"the notice file {self._file} is there"
        if self._command is not None and _succeeds(self._command):
            return f"the preemption command {shlex.join(self._command)} succeeded"
        return None if self.is_listed() else f"{self._machines} does not name this machine"

    def is_listed(self) -> bool:
        """Whether the machine list names this node; a list that cannot be read for a moment says nothing."""
        if self._machines is None:
            return True
        try:
            return bool(self._names & read_machines(self._machines))
        except ConfigError:
            return True

    def await_listed(self, deadline_s: float, wait: Callable[[float], None] = time.sleep) -> None:
        """Wait until the machine list names this node.

        Raises:
            ConfigError: it did not in time.
        """
        end = self._clock() + deadline_s
        while not self.is_listed():
            if self._clock() >= end:
                raise ConfigError(
                    f"waited {deadline_s:.0f} s for {self._machines} to name this machine"
                    f" ({', '.join(sorted(self._names))})",
                    hint="add its name to the list, or set --node-name",
                )
            wait(min(self._every_s, 1.0))


def read_machines(path: Path) -> frozenset[str]:
    """Names of a machine list: the first word of every line, without comments; slots after it or after a colon.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"expected a machine list at {path}: {found}", hint="a text file with one machine's name on every line"
        ) from error
    words = (line.partition("#")[0].split() for line in lines)
    return frozenset(found[0].partition(":")[0] for found in words if found)


def node_names(given: str | None, local_addr: str | None) -> frozenset[str]:
    """The names of this node: the one given alone, else its host's names and address."""
    if given is not None:
        return frozenset({given})
    host = socket.gethostname()
    return frozenset(name for name in (host, socket.getfqdn(), host.partition(".")[0], local_addr) if name)


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"expected --preemption-command to be a command, got {command!r}: {error}") from error
    if not words:
        raise ConfigError("expected --preemption-command to be a command, got an empty one")
    return words


def _succeeds(command: list[str]) -> bool:
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_S,
            env={name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
