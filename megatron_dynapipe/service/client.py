"""A rank's end of the store: its plans, or what went wrong in a planner."""

import time

from megatron_dynapipe.errors import PlanError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.plan.codec import decode_entry
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.service.failure import decode_failure
from megatron_dynapipe.store import PlanKeys, PlanStore

_FULL_S = 0.1


class PlanClient:
    """Fetches the plans of one (replica, stage). Safe to use from several threads."""

    def __init__(
        self,
        store: PlanStore,
        keys: PlanKeys,
        *,
        replica: int,
        stage: int,
        deadline_s: float,
        ask_s: float | None = None,
    ) -> None:
        """Keep what is needed; nothing is sent.

        Args:
            store: where plans come from.
            keys: names of this job's plans.
            replica: data-parallel replica of this rank.
            stage: pipeline stage of this rank.
            deadline_s: how long one plan is waited for.
            ask_s: after how much of that another planner is asked for; None never asks.
        """
        self._store = store
        self._keys = keys
        self._replica = replica
        self._stage = stage
        self._deadline_s = deadline_s
        self._ask_s = ask_s if ask_s is not None and ask_s < deadline_s else None

    def fetch(self, split: str, iteration: int) -> StageEntry:
        """Share of this rank in `iteration`; blocks until it is there.

        Plans published before a planner failed are still handed out.

        Raises:
            PlannerFailedError: a planner failed; its traceback is in the message.
            StoreTimeoutError: neither plan nor failure came within the deadline.
            StoreError: the store is gone.
            PlanError: what came is not this plan.
        """
        key = self._keys.plan(split=split, iteration=iteration, replica=self._replica, stage=self._stage)
        what = f"the plan of iteration {iteration} of {split} for replica {self._replica}, stage {self._stage}"
        found, data = self._await([key, self._keys.error], what)
        if found != key:
            raise decode_failure(data).to_error()
        entry = decode_entry(data)
        expected = (iteration, self._replica, self._stage)
        if (actual := (entry.iteration, entry.replica, entry.stage_plan.stage)) != expected:
            raise PlanError(f"expected the plan of (iteration, replica, stage) {expected} under {key}, got {actual}")
        return entry

    def _await(self, keys: list[str], what: str) -> tuple[str, bytes]:
        """One of the keys; where it takes long, the planners at work may hang, and another is asked for."""
        left_s = self._deadline_s
        if self._ask_s is not None:
            try:
                return self._store.wait_any(keys, timeout_s=self._ask_s, what=what)
            except StoreTimeoutError:
                topic = self._keys.planners
                asked = self._store.read_progress([topic]).get(topic, 1)
                self._store.announce(topic, asked + 1)
                left_s -= self._ask_s
        return self._store.wait_any(keys, timeout_s=left_s, what=what)

    def announce(self, split: str, iteration: int) -> None:
        """Tell the planners that training has begun `iteration`; called by rank 0 alone."""
        given_up = time.monotonic() + self._deadline_s
        while True:
            try:
                return self._store.announce(self._keys.progress(split), iteration)
            except StoreFullError:  # a planner that finds it so takes its last plans away again
                if time.monotonic() > given_up:
                    raise
                time.sleep(_FULL_S)
