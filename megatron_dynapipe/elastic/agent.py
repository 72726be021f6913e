"""torch's elastic agent, whose ranks save before they leave, and which knows leaving from failing.

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

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast, override

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from megatron_dynapipe.elastic import orphans, rendezvous
from megatron_dynapipe.elastic.job import CANNOT_START, LEFT, note
from megatron_dynapipe.runtime.watchdog import Watchdog

MOST_FRUITLESS = 5
"""Starts in a row that may fail before their first iteration: what they load or are given does not suit them."""
_FAILED_GRACE_S = 10
"""What ranks are given to end whose peers have failed: they may wait for them."""


class Agent(LocalElasticAgent):
    """One node's agent.

    Args:
        spec: what to run, over a dynamic rendezvous.
        handler: of that rendezvous.
        look: why this node should leave, if it should; asked often.
        say: prints a line.
        save_s: what ranks are given to finish their iteration, save and end.
        slow_file: made by a rank that is too slow; the node then leaves at the next change, if enough nodes are left.
        trains_file: made by a rank after its first iteration.
        least_nodes: that the job needs.
        answer_s: a rendezvous that does not answer for this long ends this process and its ranks.

    Attributes:
        watchdog: of the rendezvous; disarm it once this node waits for something else.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: DynamicRendezvousHandler,
        *,
        look: Callable[[], str | None],
        say: Callable[[str], None],
        save_s: float,
        slow_file: Path,
        trains_file: Path,
        least_nodes: int,
        answer_s: float,
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs())
        self._handler, self._look, self._say = handler, look, say
        self._save_s, self._slow_file, self._least_nodes = save_s, slow_file, least_nodes
        self._trains_file, self._fruitless = trains_file, 0
        self._helpers = orphans.children()
        self._answer_s = answer_s
        self.watchdog = Watchdog(answer_s, self._give_up)

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.watchdog.disarm()  # it has deadlines of its own
        rendezvous.forget_store(self._handler)
        note("waits")
        super()._rendezvous(worker_group)
        nodes, ranks = _nodes(worker_group), worker_group.workers[0].world_size
        note("rendezvous", nodes=nodes, ranks=ranks)
        self._say(f"{nodes} nodes, {ranks} ranks; this is node {worker_group.group_rank}")

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.watchdog.reset()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            return self._watched(worker_group, result)
        if result.state is WorkerState.SUCCEEDED:
            self.watchdog.disarm()  # other nodes' ranks may end later
        if result.state is WorkerState.FAILED:
            statuses = {failure.exitcode for failure in result.failures.values()}
            note("ended", statuses=",".join(map(str, sorted(statuses))))
            if LEFT in statuses:
                self._remaining_restarts += 1  # which the loop takes off again
                self._leave_if_slow(worker_group)
            elif CANNOT_START in statuses:
                self._remaining_restarts = 0
            else:
                self._after_failure(statuses)
        return result

    def _after_failure(self, statuses: set[int]) -> None:
        """Start anew, but not for ever where no start comes to an iteration."""
        self._fruitless = 0 if self._trains_file.exists() else self._fruitless + 1
        self._trains_file.unlink(missing_ok=True)
        if self._fruitless < MOST_FRUITLESS:
            self._say(f"a rank failed (status {sorted(statuses)}); the last checkpoint is resumed")
            return
        self._say(f"{self._fruitless} starts in a row failed before their first iteration (status {sorted(statuses)})")
        self._remaining_restarts = 0

    def _watched(self, group: WorkerGroup, healthy: RunResult) -> RunResult:
        """What becomes of a node whose ranks run."""
        if (reason := self._look()) is not None:
            raise SignalException(reason, signal.SIGTERM)
        if lost := rendezvous.lost_nodes(self._handler, _nodes(group)):
            self._say(f"{lost} of {_nodes(group)} nodes are silent or have left; the last checkpoint is resumed")
            note("lost", nodes=lost)
            self._remaining_restarts += 1
            return RunResult(state=WorkerState.UNHEALTHY)
        return healthy

    def _give_up(self) -> None:
        """End the ranks, which have lost their peers, and this process, which may wait for hours for an answer."""
        self._say(f"the rendezvous has not answered for {self._answer_s:.0f} s: this node ends")
        note("cut off")
        orphans.end_adopted(set())
        os._exit(1)

    def _leave_if_slow(self, group: WorkerGroup) -> None:
        if self._slow_file.exists() and _nodes(group) > self._least_nodes:
            raise SignalException(f"left out as slow: {self._slow_file.read_text().strip()}", signal.SIGTERM)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self.watchdog.reset(self._save_s)
        if self._pcontext is not None:
            if self._worker_group.state is WorkerState.HEALTHY:
                self._ask_to_leave(self._pcontext)
            self._pcontext.close(signal.SIGTERM, timeout=_FAILED_GRACE_S)
            note("stopped")
        super()._shutdown(death_sig)
        orphans.end_adopted(self._helpers)

    def _ask_to_leave(self, ranks: PContext) -> None:
        """SIGTERM to the ranks alone, and time to save; torch's own goes to their helper processes too, which save."""
        assert isinstance(ranks, SubprocessContext), "the entry point is a command"
        running = [handler.proc for handler in ranks.subprocess_handlers.values() if handler.proc.poll() is None]
        for rank in running:
            rank.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._save_s
        for rank in running:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))


def _nodes(group: WorkerGroup) -> int:
    return cast(int, group.group_world_size)  # known after the rendezvous
