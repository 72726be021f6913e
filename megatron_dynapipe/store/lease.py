"""Keeping a job's keys on a server that outlives the job: renewed while it lives, deleted at its end.

a rank 0 that is killed renews no more: what is left expires after the store's retention
"""

import logging
import threading
from types import TracebackType
from typing import Self

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.redis_store import RedisStore

logger = logging.getLogger(__name__)

RENEWALS = 24
"""Renewals in the time that a key is kept for: some may fail."""
_STOP_TIMEOUT_S = 5.0


class JobLease:
    """Context manager of one process of a job: renews the keys of all; a clean end of the block deletes them.

    After an error in the block the keys are left to expire: another rank may have to read what went wrong.

    Args:
        store: with the retention that is renewed; one without has nothing to renew.
        job: the launch.
        interval_s: between two renewals; None takes a share of the retention.
    """

    def __init__(self, store: RedisStore, job: str, *, interval_s: float | None = None) -> None:
        self._store = store
        self._job = job
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="dynapipe-lease", daemon=True)

    def __enter__(self) -> Self:
        if self._store.retention_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        if kind is None:
            try:
                self._store.delete_job(self._job)
            except StoreError as problem:
                logger.warning("cannot delete this job's keys, which expire by themselves: %s", problem)

    def _renew(self) -> None:
        assert self._store.retention_s is not None
        interval_s = self._interval_s or self._store.retention_s / RENEWALS
        while not self._ended.wait(interval_s):
            try:
                self._store.renew(self._job)
            except StoreError as problem:
                logger.warning("cannot renew this job's keys in the plan store: %s", problem)
