"""Plans made once for all ranks: published by one, fetched by the others through the plan store."""

from collections.abc import Sequence

from megatron_dynapipe.modules.planner import ModulePlanner
from megatron_dynapipe.plan.codec import encode_entries
from megatron_dynapipe.plan.iteration import StageEntry
from megatron_dynapipe.service.client import PlanClient
from megatron_dynapipe.service.failure import PlannerFailure
from megatron_dynapipe.store import PlanKeys, PlanStore, StoreAddress, open_store

SPLIT = "train"


class PublishedPlans:
    """One rank's end. Iteration i is planned by rank i mod ranks; connects when it is first used, in a worker.

    Args:
        address: of the store.
        job: name of this launch.
        planner: of all ranks alike.
        rank: of this process.
        deadline_s: how long a plan is waited for.
    """

    def __init__(
        self, address: StoreAddress, job: str, planner: ModulePlanner, *, rank: int, deadline_s: float = 300.0
    ) -> None:
        self._address, self._planner, self._rank = address, planner, rank
        self._keys = PlanKeys(job=job, settings_digest=planner.digest)
        self._deadline_s = deadline_s
        self._store: PlanStore | None = None

    def entry(self, iteration: int, lengths: Sequence[int], *, replica: int, stage: int) -> StageEntry:
        """The share of this rank in an iteration; it is dropped from the store.

        Raises:
            PlanningError: the batch cannot be planned; on ranks that wait for it, a PlannerFailedError that says so.
            StoreTimeoutError: the plan did not come.
        """
        if self._store is None:
            self._store = open_store(self._address)
        store, ranks = self._store, self._planner.replicas * self._planner.stages
        if iteration % ranks == self._rank:
            try:
                plan = self._planner.plan(lengths, iteration)
            except Exception as error:
                failure = PlannerFailure.of(error, planner=self._rank, doing=f"planning iteration {iteration}")
                store.put_first(self._keys.error, failure.encode())
                raise
            for to_replica, to_stage, data in encode_entries(plan):
                store.put(self._key(iteration, to_replica, to_stage), data)
        client = PlanClient(store, self._keys, replica=replica, stage=stage, deadline_s=self._deadline_s)
        entry = client.fetch(SPLIT, iteration)
        store.delete([self._key(iteration, replica, stage)])
        return entry

    def _key(self, iteration: int, replica: int, stage: int) -> str:
        return self._keys.plan(split=SPLIT, iteration=iteration, replica=replica, stage=stage)
