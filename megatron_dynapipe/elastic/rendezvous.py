"""What torch's dynamic rendezvous does not offer: a store for every round, leaving at once, noticing who is gone.

All of it touches private parts of `DynamicRendezvousHandler` (torch 2.11), which is why it stands here alone.
"""

import contextlib
import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from megatron_dynapipe.errors import ConfigError, DynaPipeError

_LEAVE_S = 10.0
_CLAIM_S = 30.0


def open_rendezvous(parameters: RendezvousParameters) -> DynamicRendezvousHandler:
    """Connect to a rendezvous, or host it.

    Raises:
        ConfigError: nobody answers, the backend is none of c10d and etcd-v2, or a package is missing.
    """
    if _is_own_address(parameters):
        parameters.config.setdefault("is_host", "true")
    try:
        handler = get_rendezvous_handler(parameters)
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
    except (RendezvousError, ValueError) as error:
        raise ConfigError(f"this rendezvous cannot be opened: {error}") from error
    if not isinstance(handler, DynamicRendezvousHandler):
        raise ConfigError(f"expected the rendezvous backend c10d or etcd-v2, got {parameters.backend}")
    return handler


def _is_own_address(parameters: RendezvousParameters) -> bool:
    """Whether this node is to host the rendezvous and torch would not find out.

    torch knows the addresses to which the host's name resolves; --local-addr may be of another network interface.
    """
    host, _ = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    own = parameters.backend == "c10d" and host == parameters.local_addr
    return own and not _matches_machine_hostname(host)


def claim(handler: DynamicRendezvousHandler, command: Sequence[str]) -> None:
    """Say what this job runs, and refuse to join a job of the same id that runs something else; c10d only.

    Arguments are told by their digest: there may be a password among them.

    Raises:
        ConfigError: names the other job's script.
    """
    store = handler._store
    digest = hashlib.blake2b("\0".join(command[1:]).encode(), digest_size=6).hexdigest()
    mine = f"{Path(command[0]).name} with arguments of digest {digest}"
    if not isinstance(store, TCPStore):
        return
    run_id = handler.get_run_id()
    store.set_timeout(timedelta(seconds=_CLAIM_S))
    try:
        held = store.compare_set(f"dynapipe/launch/{run_id}", "", mine).decode()
    except RuntimeError as error:
        raise ConfigError("the rendezvous stopped answering", hint="look at the machine of --rdzv-endpoint") from error
    if held != mine:
        raise ConfigError(
            f"expected the job {run_id!r} to be this one, {mine}, got {held}",
            hint="give every job a --rdzv-id of its own, and the same command on all of its nodes",
        )


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
    """An error of the rendezvous while the job runs, in words."""
    joined = f"job {parameters.run_id!r} at {parameters.endpoint}"
    if isinstance(error, RendezvousTimeoutError):
        least = parameters.min_nodes
        return ConfigError(
            f"expected at least {least} nodes of {joined} within {parameters.get('join_timeout')} s, fewer came",
            hint="start `launch` on more nodes; --nnodes MIN:MAX asks for fewer, --join-timeout allows more time",
        )
    if isinstance(error, RendezvousClosedError):
        return ConfigError(f"{joined} has ended", hint="a new job needs a --rdzv-id of its own")
    return ConfigError(
        f"the rendezvous of {joined} stopped answering",
        hint="keep --rdzv-endpoint on a machine that stays, or use --rdzv-backend etcd-v2",
    )
