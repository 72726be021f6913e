"""`launch` on one node: an agent in a rendezvous, until the job has ended or this node leaves it."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from megatron_dynapipe.elastic import orphans, rendezvous
from megatron_dynapipe.elastic.agent import Agent
from megatron_dynapipe.elastic.job import CANNOT_START, Job, note
from megatron_dynapipe.elastic.notices import Notices, node_names
from megatron_dynapipe.errors import ConfigError

NOTICE_SIGNALS = "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
TRAINS = "trains"
_MONITOR_S = 0.1
_ANSWER_S = 30
"""Beyond two of its read timeouts, what the rendezvous has to answer in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What `launch` was asked for.

    Attributes:
        least_nodes, most_nodes: of the job.
        ranks: on this node.
        most_ranks: of the job.
        backend, endpoint, run_id, options: of the rendezvous; `options` are torch's `--rdzv-conf`.
        local_addr: this node's address for the others.
        join_s: how long the rendezvous waits for enough nodes, and ranks for more of them.
        last_call_s: how long it waits for more than enough.
        max_restarts: failures and losses without notice that the job survives.
        save_s: what ranks are given to finish an iteration and save.
        notice_file, preemption_command, machine_list, notice_every_s: see `Notices`.
        node_name: of this node in the machine list; None takes its host's.
        emergency_every, exclude_slow: see `Job`.
        events: file to which events are appended.
    """

    least_nodes: int
    most_nodes: int
    ranks: int
    most_ranks: int
    backend: str = "c10d"
    endpoint: str
    run_id: str
    options: dict[str, str]
    local_addr: str | None = None
    join_s: int = 600
    last_call_s: int = 5
    max_restarts: int = 100
    save_s: float = 300
    notice_file: Path | None = None
    preemption_command: str | None = None
    machine_list: Path | None = None
    notice_every_s: float = 5
    node_name: str | None = None
    emergency_every: int | None = None
    exclude_slow: float | None = None
    events: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least_nodes <= self.most_nodes:
            raise ConfigError(f"expected --nnodes MIN:MAX with 1 ≤ MIN ≤ MAX, got {self.least_nodes}:{self.most_nodes}")
        if self.exclude_slow is not None and not self.exclude_slow > 1:
            raise ConfigError(f"expected --exclude-slow to be above 1, got {self.exclude_slow}")

    def parameters(self) -> RendezvousParameters:
        """For torch: heartbeats every 2 s, five of which may be missed, unless `options` say otherwise."""
        beats = {"keep_alive_interval": "2", "keep_alive_max_attempt": "5", "read_timeout": str(min(self.join_s, 60))}
        waits = {"join_timeout": str(self.join_s), "last_call_timeout": str(self.last_call_s)}
        return RendezvousParameters(
            backend=self.backend,
            endpoint=self.endpoint,
            run_id=self.run_id,
            min_nodes=self.least_nodes,
            max_nodes=self.most_nodes,
            local_addr=self.local_addr,
            **(beats | waits | self.options),
        )


def launch(settings: LaunchSettings, command: Sequence[str]) -> int:
    """Run a training script on this node's ranks while the job lasts; the exit status.

    Args:
        settings: of the job and the node.
        command: script and its arguments, the same on all nodes.

    Returns:
        0: the job has ended well, or this node has left it; 1: it has failed; 2: the ranks could not start.

    Raises:
        ConfigError: nobody answers at the rendezvous, too few nodes came in time, another job has this id, or the
            machine list cannot be read.
    """
    notices = Notices(
        notice_file=settings.notice_file,
        command=settings.preemption_command,
        machine_list=settings.machine_list,
        names=node_names(settings.node_name, settings.local_addr),
        every_s=settings.notice_every_s,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = NOTICE_SIGNALS
    orphans.adopt()
    with tempfile.TemporaryDirectory(prefix="dynapipe-launch-") as folder:
        slow_file = Path(folder) / "slow"
        _job(settings, slow_file).to_environment()
        notices.await_listed(settings.join_s)
        parameters = settings.parameters()
        handler = rendezvous.open_rendezvous(parameters)
        rendezvous.claim(handler, command)
        while (status := _stay(settings, command, parameters, handler, notices, slow_file)) is None:
            _say("waiting until the machine list names this machine again")
            notices.await_listed(settings.join_s)
        return status


def _job(settings: LaunchSettings, slow_file: Path) -> Job:
    return Job(
        most_ranks=settings.most_ranks,
        wait_s=settings.join_s,
        emergency_every=settings.emergency_every,
        exclude_slow=settings.exclude_slow,
        slow_file=str(slow_file),
        trains_file=str(slow_file.with_name(TRAINS)),
        events=None if settings.events is None else str(settings.events.absolute()),
    )


def _stay(
    settings: LaunchSettings,
    command: Sequence[str],
    parameters: RendezvousParameters,
    handler: DynamicRendezvousHandler,
    notices: Notices,
    slow_file: Path,
) -> int | None:
    """Take part until the end: its exit status; None where this node may come back."""
    slow_file.unlink(missing_ok=True)
    spec = WorkerSpec(
        role="default",
        local_world_size=settings.ranks,
        entrypoint=sys.executable,
        args=("-u", *command),
        rdzv_handler=handler,
        max_restarts=settings.max_restarts,
        monitor_interval=_MONITOR_S,
        local_addr=settings.local_addr,
    )
    agent = Agent(
        spec,
        handler,
        look=notices.look,
        say=_say,
        save_s=settings.save_s,
        slow_file=slow_file,
        trains_file=slow_file.with_name(TRAINS),
        least_nodes=settings.least_nodes,
        answer_s=2 * (parameters.get_as_int("read_timeout") or 60) + _ANSWER_S,
    )
    try:
        result = agent.run()
    except SignalException as reason:
        rendezvous.leave(handler)
        _say(f"this node leaves the job: {reason}")
        note("left", reason=str(reason))
        return None if not notices.is_listed() and reason.sigval is signal.SIGTERM else 0
    except RendezvousError as error:
        raise rendezvous.explain(error, parameters) from error
    finally:
        agent.watchdog.disarm()
    handler.shutdown()
    if not result.is_failed():
        return 0
    failed = min(result.failures.values(), key=lambda failure: failure.timestamp)
    _say(f"the job has failed: rank {failed.local_rank} of this node ended with status {failed.exitcode}")
    return CANNOT_START if failed.exitcode == CANNOT_START else 1


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} launch: {line}", file=sys.stderr, flush=True)
