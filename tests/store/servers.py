"""Servers of other kinds than a run's own: under TLS, with users, as a cluster's node, as a sentinel."""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from megatron_dynapipe.store import StoreAddress, open_store
from megatron_dynapipe.store.server import find_server_binary


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return int(probe.getsockname()[1])


def server_pid(address: StoreAddress) -> int:
    """The server's own process id, as it says itself."""
    with open_store(address) as store:
        return int(store.info("server")["process_id"])


def accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def serving(
    folder: Path, settings: str, *, port: int, words: tuple[str, ...] = (), program: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A server of these settings, as its administrator would start it."""
    path = folder / f"server-{port}.conf"
    path.write_text(f'bind 127.0.0.1\nsave ""\ndir {folder}\n{settings}\n')
    log = (folder / f"server-{port}.log").open("w")
    command = [program or find_server_binary(), path, *words]
    with log, subprocess.Popen(command, stdout=log, stderr=log, text=True) as server:
        try:
            deadline = time.monotonic() + 20
            while not accepts(port):
                assert server.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
                time.sleep(0.02)
            yield server
        finally:
            server.kill()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine, signed by itself, and its key."""
    openssl = shutil.which("openssl")
    assert openssl is not None
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=localhost"
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    subprocess.run([openssl, *words.split(), *names], check=True, capture_output=True)
    return cert, key


class Relay:
    """Passes connections on to a server's port; under TLS where it has a certificate. Links may be cut and slowed."""

    def __init__(self, to_port: int, tls: tuple[Path, Path] | None = None, *, delay_s: float = 0.0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.to_port = to_port
        self.delay_s = delay_s
        self.is_cut = False
        self._context = None
        if tls is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*tls)
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Drop every connection, and those to come."""
        self.is_cut = True
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.to_port)) as far:
            if self._context is not None:
                near = self._context.wrap_socket(near, server_side=True)
            self._links += [near, far]
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()
        near.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                target.sendall(data)
        for link in (source, target):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


class Scripted:
    """A server that answers the first two requests of each connection as Redis does, and the next ones in pieces."""

    def __init__(self, pieces: Sequence[bytes] | Callable[[], Sequence[bytes]], pause_s: float = 0.0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._pieces, self._pause_s = pieces, pause_s
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with suppress(OSError), link:
            for answer in (b"-NOPERM INFO\r\n", b"+PONG\r\n"):
                link.recv(65536)
                link.sendall(answer)
            while link.recv(65536):
                for piece in self._pieces() if callable(self._pieces) else self._pieces:
                    link.sendall(piece)
                    time.sleep(self._pause_s)
