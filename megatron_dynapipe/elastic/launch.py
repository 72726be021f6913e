"""`launch` on one node: torch's elastic agent in a rendezvous, until the job has ended or this node leaves it.

state of the ranks          torch's agent                  here
all have ended well         ends                           the same
one has failed              starts anew, counted           the same; not at all where it cannot start (status 2),
                                                           nor where five starts in a row came to no iteration
they have saved and left    –                              starts anew, not counted (status 75)
a node waits to join        stops them, starts anew        the same: SIGTERM, and time enough to save
a node is silent            goes on (pytorch #111646)      starts anew, not counted
the rendezvous is silent    waits as long as TCP does      ends them, and itself
a notice for this node      –                              stops them, ends
"""

import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast, override

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_dynapipe.elastic import rendezvous
from megatron_dynapipe.elastic.job import CANNOT_START, LEFT, SAVE_EVERY, Job
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.processes import adopt_orphans, children, end_adopted

MOST_FRUITLESS = 5
"""Starts in a row that may fail before their first iteration: what they load or are given does not suit them."""
_NOTICE_SIGNALS = "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
_FAILED_GRACE_S = 10
"""What ranks are given to end whose peers have failed: they may wait for them."""
_MONITOR_S = 0.1
_ANSWER_S = 30
"""Beyond two of its read timeouts, what the rendezvous has to answer in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What `launch` was asked for.

    Attributes:
        least_nodes, most_nodes: of the job.
        ranks: on this node; every node has as many.
        backend, endpoint, run_id, options: of the rendezvous; `options` are torch's `--rdzv-conf`.
        local_addr: this node's address for the others.
        join_s: how long the rendezvous waits for enough nodes, and ranks for more of them.
        last_call_s: how long it waits for more than enough.
        max_restarts: failures and losses without notice that the job survives.
        save_s: what ranks are given to finish an iteration and save.
        notice_file: the node leaves once it exists.
        emergency_every: see `Job`.
    """

    least_nodes: int
    most_nodes: int
    ranks: int
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
    emergency_every: int = SAVE_EVERY

    def __post_init__(self) -> None:
        if not 1 <= self.least_nodes <= self.most_nodes:
            raise ConfigError(f"expected --nnodes MIN:MAX with 1 ≤ MIN ≤ MAX, got {self.least_nodes}:{self.most_nodes}")

    def parameters(self) -> RendezvousParameters:
        """For torch: heartbeats every 2 s, five of which may be missed, unless `options` say otherwise."""
        beats = {"keep_alive_interval": "2", "keep_alive_max_attempt": "5", "read_timeout": str(min(self.join_s, 60))}
        waits = {"join_timeout": str(self.join_s), "last_call_timeout": str(self.last_call_s)}
        host, _ = parse_rendezvous_endpoint(self.endpoint, default_port=-1)
        return RendezvousParameters(
            backend=self.backend,
            endpoint=self.endpoint,
            run_id=self.run_id,
            min_nodes=self.least_nodes,
            max_nodes=self.most_nodes,
            local_addr=self.local_addr or (host if rendezvous.is_loopback(host) else None),
            **(beats | waits | self.options),
        )

    def job(self, trains_file: Path) -> Job:
        """What ranks are to know."""
        return Job(
            most_ranks=self.most_nodes * self.ranks,
            wait_s=self.join_s,
            emergency_every=self.emergency_every,
            trains_file=str(trains_file),
        )


def launch(settings: LaunchSettings, command: Sequence[str]) -> int:
    """Run a training script on this node's ranks while the job lasts; the exit status.

    Returns:
        0: the job has ended well, or this node has left it; 1: it has failed; 2: the ranks could not start.

    Raises:
        ConfigError: nobody answers at the rendezvous, too few nodes came in time, another job has this id, or the nodes
            do not share a key.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _NOTICE_SIGNALS
    logging.getLogger(SubprocessContext.__module__).addFilter(_is_news)
    adopt_orphans()
    parameters = settings.parameters()
    handler = rendezvous.open_rendezvous(parameters, command)
    with tempfile.TemporaryDirectory(prefix="dynapipe-launch-") as folder:
        trains_file = Path(folder) / "trains"
        settings.job(trains_file).to_environment()
        try:
            agent = Agent(settings, command, handler, parameters, trains_file)
            result = agent.run()
        except SignalException as reason:
            rendezvous.leave(handler)
            _say(f"this node leaves the job: {reason}")
            return 0
        except RendezvousError as error:
            raise rendezvous.explain(error, parameters) from error
        agent.expect_answer(within_s=math.inf)
    handler.shutdown()
    if not result.is_failed():
        return 0
    failed = min(result.failures.values(), key=lambda failure: failure.timestamp)
    _say(f"the job has failed: rank {failed.local_rank} of this node ended with status {failed.exitcode}")
    return CANNOT_START if failed.exitcode == CANNOT_START else 1


class Agent(LocalElasticAgent):
    """One node's agent: its ranks save before they leave, and it knows leaving from failing."""

    def __init__(
        self,
        settings: LaunchSettings,
        command: Sequence[str],
        handler: DynamicRendezvousHandler,
        parameters: RendezvousParameters,
        trains_file: Path,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=settings.ranks,
            entrypoint=sys.executable,
            args=("-u", *command),
            rdzv_handler=handler,
            max_restarts=settings.max_restarts,
            monitor_interval=_MONITOR_S,
            local_addr=parameters.local_addr,
        )
        super().__init__(spec, DefaultLogsSpecs())
        self._settings, self._handler = settings, handler
        self._trains_file, self._fruitless = trains_file, 0
        self._helpers = children()
        self._answer_s = 2 * (parameters.get_as_int("read_timeout") or 60) + _ANSWER_S
        self._answer_due = math.inf
        threading.Thread(target=self._await_answer, name="rendezvous-answers", daemon=True).start()

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.expect_answer(within_s=math.inf)  # it has deadlines of its own
        rendezvous.forget_store(self._handler)
        super()._rendezvous(worker_group)
        nodes, ranks = _nodes(worker_group), worker_group.workers[0].world_size
        _say(f"{nodes} nodes, {ranks} ranks; this is node {worker_group.group_rank}")

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.expect_answer(within_s=self._answer_s)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            return self._check_nodes(worker_group, result)
        if result.state is WorkerState.SUCCEEDED:
            self.expect_answer(within_s=math.inf)  # other nodes' ranks may end later
        if result.state is WorkerState.FAILED:
            self._count_failure({failure.exitcode for failure in result.failures.values()})
        return result

    def _count_failure(self, statuses: set[int]) -> None:
        """Start anew, but not for ever where no start comes to an iteration."""
        if LEFT in statuses:
            _say("ranks have saved a checkpoint and left: the nodes that are there go on")
            self._remaining_restarts += 1  # which the loop takes off again
            return
        if CANNOT_START in statuses:
            self._remaining_restarts = 0
            return
        self._fruitless = 0 if self._trains_file.exists() else self._fruitless + 1
        self._trains_file.unlink(missing_ok=True)
        if self._fruitless < MOST_FRUITLESS:
            _say(f"a rank failed (status {sorted(statuses)}); the last checkpoint is resumed")
            return
        _say(f"{self._fruitless} starts in a row failed before their first iteration (status {sorted(statuses)})")
        self._remaining_restarts = 0

    def _check_nodes(self, group: WorkerGroup, healthy: RunResult) -> RunResult:
        """Leave on notice; start anew where a node is lost."""
        file = self._settings.notice_file
        if file is not None and file.exists():
            raise SignalException(f"the notice file {file} is there", signal.SIGTERM)
        if lost := rendezvous.lost_nodes(self._handler, _nodes(group)):
            _say(f"{lost} of {_nodes(group)} nodes are silent or have left; the last checkpoint is resumed")
            self._remaining_restarts += 1
            return RunResult(state=WorkerState.UNHEALTHY)
        return healthy

    def expect_answer(self, *, within_s: float) -> None:
        """End this process and its ranks unless the rendezvous has answered by then, which is when this is called next.

        A call of torch's store may wait for as long as TCP tries, for hours.
        """
        self._answer_due = time.monotonic() + within_s

    def _await_answer(self) -> None:
        while time.monotonic() < self._answer_due:
            time.sleep(1.0)
        _say(f"the rendezvous has not answered for {self._answer_s:.0f} s: this node ends")
        end_adopted(set())  # its ranks, too, which have lost their peers
        os._exit(1)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self.expect_answer(within_s=self._answer_s + self._settings.save_s)
        if self._pcontext is not None:
            if self._worker_group.state is WorkerState.HEALTHY:
                self._ask_to_leave(self._pcontext)
            self._pcontext.close(signal.SIGTERM, timeout=_FAILED_GRACE_S)
        super()._shutdown(death_sig)
        end_adopted(self._helpers)

    def _ask_to_leave(self, ranks: PContext) -> None:
        """SIGTERM to the ranks alone, and time to save; torch's own goes to their helper processes too, which save."""
        assert isinstance(ranks, SubprocessContext), "the entry point is a command"
        running = [handler.proc for handler in ranks.subprocess_handlers.values() if handler.proc.poll() is None]
        for rank in running:
            rank.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._settings.save_s
        for rank in running:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))


def _is_news(record: logging.LogRecord) -> bool:
    """A filter of torch's log, which repeats that ranks have left, could not start, or are ended: it is said here."""
    said = record.args if isinstance(record.args, tuple) else ()
    known = str(record.msg).startswith("failed (exitcode") and said[:1] in ((LEFT,), (CANNOT_START,))
    return not known and not str(record.msg).startswith("Sending process")


def _nodes(group: WorkerGroup) -> int:
    return cast(int, group.group_world_size)  # known after the rendezvous


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} launch: {line}", file=sys.stderr, flush=True)
