"""The planner processes of one node: those that a job begins with, and those that it asks for later.

job        planner 0    1    2    3    …        planner p is on node p mod nodes
node 0             0         2
node 1                  1         3
"""

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from megatron_dynapipe.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.service.process import PlannerProcess
from megatron_dynapipe.service.settings import ServiceSettings
from megatron_dynapipe.store import RedisStore

logger = logging.getLogger(__name__)

_LOOK_S = 600.0
_STOP_TIMEOUT_S = 5.0


class PlannerPool:
    """Context manager on one process of each node: its planners, for as long as the block lasts.

    Args:
        settings: of every planner; `most_planners` is how many the whole job may have.
        node, nodes: this node, and how many there are.
        first: planners that the whole job begins with.
        log_folder: where planner p logs to `planner-p.log`.
    """

    def __init__(self, settings: ServiceSettings, *, node: int, nodes: int, first: int, log_folder: Path) -> None:
        self._settings = settings
        self._log_folder = log_folder
        mine = range(node, settings.most_planners, nodes)
        self._at_once = [planner for planner in mine if planner < first]
        self._later = [planner for planner in mine if planner >= first]
        self._processes = ExitStack()
        self._lock = threading.Lock()
        self._is_ended = False
        self._store: RedisStore | None = None
        self._thread = threading.Thread(target=self._watch, name="dynapipe-planners", daemon=True)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._processes)
            for planner in self._at_once:
                self._start(planner)
            if self._later:
                self._store = self._processes.enter_context(self._settings.open_store(is_known=True))
                self._thread.start()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_ended = True
        self._processes.close()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def _watch(self) -> None:
        """Start this node's planners as the job asks for them."""
        assert self._store is not None
        topic = self._settings.keys.planners
        while self._later:
            goal = {topic: self._later[0] + 1}
            try:
                self._store.wait_progress(goal, timeout_s=_LOOK_S, what="another planner to be asked for")
            except StoreTimeoutError:
                continue
            except StoreError:
                return  # closed, or gone: whoever waits for a plan says so
            with self._lock:
                if self._is_ended:
                    return
                self._start(self._later.pop(0))

    def _start(self, planner: int) -> None:
        settings = msgspec.structs.replace(self._settings, planner=planner)
        log = self._log_folder / f"planner-{planner}.log"
        self._processes.enter_context(PlannerProcess(settings, log_path=log))
