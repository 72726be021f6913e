"""A rank's end of the store: its plans, or what went wrong in a planner."""

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.codec import decode_entry
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.service.failure import decode_failure
from megatron_dynapipe.store import PlanKeys, PlanStore


class PlanClient:
    """Fetches the plans of one (replica, stage). Safe to use from several threads."""

    def __init__(self, store: PlanStore, keys: PlanKeys, *, replica: int, stage: int, deadline_s: float) -> None:
        """Keep what is needed; nothing is sent.

        Args:
            store: where plans come from.
            keys: names of this job's plans.
            replica: data-parallel replica of this rank.
            stage: pipeline stage of this rank.
            deadline_s: how long one plan is waited for.
        """
        self._store = store
        self._keys = keys
        self._replica = replica
        self._stage = stage
        self._deadline_s = deadline_s

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
        found, data = self._store.wait_any(
            [key, self._keys.error],
            timeout_s=self._deadline_s,
            what=f"the plan of iteration {iteration} of {split} for replica {self._replica}, stage {self._stage}",
        )
        if found != key:
            raise decode_failure(data).to_error()
        entry = decode_entry(data)
        expected = (iteration, self._replica, self._stage)
        if (actual := (entry.iteration, entry.replica, entry.stage_plan.stage)) != expected:
            raise PlanError(f"expected the plan of (iteration, replica, stage) {expected} under {key}, got {actual}")
        return entry

    def announce(self, split: str, iteration: int) -> None:
        """Tell the planners that training has begun `iteration`; called by rank 0 alone."""
        self._store.announce(self._keys.progress(split), iteration)
