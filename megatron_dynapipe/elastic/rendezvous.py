"""What torch's dynamic rendezvous does not offer, on private parts of its handler (torch 2.11).

listening    on the endpoint's address alone, not on all interfaces
signatures   torch unpickles the state that nodes share, which runs code: only what a node of the job signed is read
rounds       a store for each, leaving at once, noticing who is gone
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, override

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
    _RendezvousExitOp,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from megatron_dynapipe.errors import ConfigError, DynaPipeError
from megatron_dynapipe.files import read_bounded, user_cache_folder

KEY_VARIABLE = "DYNAPIPE_LAUNCH_KEY"
"""Environment variable with the key that the nodes of a job share; without it, a file in the user's cache folder."""
_LEAST_KEY = 16
_LEAVE_S = 10.0


def open_rendezvous(parameters: RendezvousParameters, command: Sequence[str]) -> DynamicRendezvousHandler:
    """Connect to a rendezvous, or host it.

    Args:
        parameters: of the job and the node.
        command: what the job runs: nodes that run something else are not of the job.

    Raises:
        ConfigError: nobody answers, the key cannot be read, or a package is missing.
    """
    job = "\0".join([parameters.run_id, Path(command[0]).name, *command[1:]])
    key = shared_key() if parameters.max_nodes > 1 else secrets.token_bytes()
    try:
        store, backend = _backend(parameters)
        handler = create_handler(store, SignedBackend(backend, hmac.digest(key, job.encode(), "sha256")), parameters)
    except RendezvousConnectionError as error:
        raise ConfigError(
            f"expected a rendezvous at {parameters.endpoint}, and nobody answers there",
            hint="start `launch` on the machine of --rdzv-endpoint first; look at its name, port and firewall",
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"the rendezvous backend {parameters.backend} needs a package that is missing: {error}",
            hint="pip install python-etcd, or use --rdzv-backend c10d",
        ) from error
    except (RendezvousError, ValueError, OSError) as error:
        raise ConfigError(f"this rendezvous cannot be opened: {error}") from error
    handler._create_tcp_store_server = _store_of_round  # type: ignore[method-assign]
    return handler


def _backend(parameters: RendezvousParameters) -> tuple[Any, RendezvousBackend]:
    if parameters.backend != "c10d":
        from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend  # needs python-etcd

        backend, etcd = etcd_rendezvous_backend.create_backend(parameters)
        return etcd, backend
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    timeout_s = parameters.get_as_int("read_timeout") or 60
    asked = parameters.get_as_bool("is_host")
    is_host = asked if asked is not None else host == parameters.local_addr or _matches_machine_hostname(host)
    store: TCPStore | None = None
    if is_host:
        try:
            store = listening_store(host, port, timeout_s=timeout_s)
        except OSError as error:
            if asked or error.errno != errno.EADDRINUSE:
                raise  # else another node of the job on this machine hosts it
    try:
        store = store or TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
    return store, C10dRendezvousBackend(store, parameters.run_id)


def listening_store(host: str, port: int, *, timeout_s: float = 300.0) -> TCPStore:
    """A store that listens on one address of this machine.

    Args:
        host: name or address, as the other nodes have it. Where this machine resolves its own name to a loopback
            address (Debian's /etc/hosts) or to one that no interface has (behind address translation), other nodes
            could not reach that: then the store listens on all interfaces.
        port: 0 takes a free one.
        timeout_s: of its operations.

    Raises:
        OSError: the port is taken, or the name is not known.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, (address, *_) = min(found, key=lambda each: each[0] != socket.AF_INET)
    if is_loopback(str(address)) and not is_loopback(host):
        address = ""
    try:
        listener = socket.create_server((str(address), port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listener = socket.create_server(("", port), family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=timeout_s),
    )


def _store_of_round(master_addr: str, master_port: int) -> TCPStore:
    """In place of torch's, which listens on all interfaces."""
    return listening_store(master_addr, master_port)


def is_loopback(host: str) -> bool:
    """Whether a name or address means the machine on which it is read, on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def shared_key() -> bytes:
    """The key with which the nodes of a job sign what they share; made for the user where there is none.

    Raises:
        ConfigError: it is too short, cannot be read or made, or others may read its file.
    """
    if (given := os.environ.get(KEY_VARIABLE)) is not None:
        if len(given) < _LEAST_KEY:
            raise ConfigError(f"expected {KEY_VARIABLE} to have {_LEAST_KEY} characters or more, got {len(given)}")
        return given.encode()
    path = _key_file()
    try:
        if not path.exists():
            _make_key(path)
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"expected {path} to be readable by its owner alone", hint=f"chmod 600 {path}")
        key = read_bounded(path, most_bytes=1000).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key of `launch`, {path}: {error.strerror}", hint=_key_hint()) from error
    if len(key) < _LEAST_KEY:
        raise ConfigError(f"expected {path} to hold {_LEAST_KEY} bytes or more, got {len(key)}", hint=f"delete {path}")
    return key


def _key_file() -> Path:
    return user_cache_folder() / "launch.key"


def _key_hint() -> str:
    return f"set {KEY_VARIABLE} to the same random text on all nodes, or copy {_key_file()} to all of them"


def _make_key(path: Path) -> None:
    """Make a key that only its owner can read; one that another process makes at the same time stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, fresh = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        Path(fresh).unlink()


class SignedBackend(RendezvousBackend):
    """Another backend, whose state is signed: torch unpickles it, and gets none that lacks the key's signature."""

    def __init__(self, backend: RendezvousBackend, key: bytes) -> None:
        self._backend, self._key = backend, key

    @property
    @override
    def name(self) -> str:
        return str(self._backend.name)

    @override
    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    @override
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(self._signature(state) + state, token)
        return None if found is None else (self._checked(found[0]), *found[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _checked(self, signed: bytes) -> bytes:
        size = hashlib.sha256().digest_size
        signature, state = signed[:size], signed[size:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError("the state is not signed with the key of the job")
        return state


def forget_store(handler: DynamicRendezvousHandler) -> None:
    """Make the next round have a store of its own for its ranks.

    The handler keeps the address of its first round's: a node that joins later waits for an address that nobody sets,
    a node that becomes the first has no server, and ranks read keys of the rounds before.
    """
    handler._bootstrap_store_info = None
    handler._shared_tcp_store_server = None


def leave(handler: DynamicRendezvousHandler) -> None:
    """Leave without closing it, so that the others need not wait until this node's heartbeats are missed."""
    with contextlib.suppress(RendezvousError):
        handler._stop_heartbeats()
        handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_S)


def lost_nodes(handler: DynamicRendezvousHandler, nodes: int) -> int:
    """How many of a round's nodes have left it or are silent; torch sees new nodes alone (pytorch #111646)."""
    try:
        with handler._heartbeat_lock:
            handler._state_holder.sync()
            return max(0, nodes - len(handler._state_holder.state.participants))
    except RendezvousError:
        return 0  # the loop of the agent asks the same store right after


def explain(error: RendezvousError, parameters: RendezvousParameters) -> DynaPipeError:
    """An error of the rendezvous while the job runs, for users."""
    joined = f"job {parameters.run_id!r} at {parameters.endpoint}"
    if isinstance(error, RendezvousTimeoutError):
        least = parameters.min_nodes
        return ConfigError(
            f"expected at least {least} nodes of {joined} within {parameters.get('join_timeout')} s, fewer came",
            hint="start `launch` on more nodes; --nnodes MIN:MAX asks for fewer, --join-timeout allows more time",
        )
    if isinstance(error, RendezvousStateError):
        return ConfigError(
            f"expected {joined} to be signed with this node's key and to run this command, it is not",
            hint=f"the same command on all nodes, a --rdzv-id for each job, one key: {_key_hint()}",
        )
    if isinstance(error, RendezvousClosedError):
        return ConfigError(f"{joined} has ended", hint="a new job needs a --rdzv-id of its own")
    return ConfigError(
        f"the rendezvous of {joined} stopped answering",
        hint="keep --rdzv-endpoint on a machine that stays, or use --rdzv-backend etcd-v2",
    )
