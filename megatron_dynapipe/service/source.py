"""A node's plans: from the store, and where they are late, made here.

    store ──► late? ──► made by one node, here or elsewhere, by the same pure function: the same bytes ──► store
                └─ 10 s, or six times as long as the first plans took; half of the deadline before the first has come

After a late plan nothing is waited for, until planners have been on time for a while: what is not there is made. Where
the node that is to make it is late, too, each makes its own. A store that fails is asked again after a minute.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from megatron_dynapipe.core.errors import StoreError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.service.corrections import Correction, in_force
from megatron_dynapipe.service.failure import decode_failure, describe_failure
from megatron_dynapipe.service.planned_splits import PlannedSplits
from megatron_dynapipe.service.settings import PlanInputs
from megatron_dynapipe.store import PlanKeys, Store

logger = logging.getLogger(__name__)

LATE_S = 10.0
_TIMES = 6
"""A planner's first plan may come after three others that it follows."""
_FIRST_PLANS = 8
"""So many are the first ones: how long they are waited for is how long plans take."""
_KEPT = 64
"""Iterations for which a plan that was made here stays in the store, more than nodes are apart."""
_ASK_AGAIN_S = 60.0
_SLICE_S = 1.0
_AT_ONCE_S = 0.001

type Place = tuple[int, int]
"""(replica, stage)."""


class PlanSource:
    """Plans for the ranks of one node. Safe to use from several threads.

    Args:
        inputs: what plans are made from.
        store: where planners publish them; None makes all of them here.
        keys: names of this job's plans.
        who: this rank, for messages.
        deadline_s: the deadline of one plan.
        planners: the number of the job's planners, one on each node.
        node: this one's number.
        may_come: whether planners are at work, as far as this node knows; asked while a plan is awaited.
        say: tells the user that plans are made here, and why.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        store: Store | None,
        keys: PlanKeys,
        *,
        who: str,
        deadline_s: float,
        planners: int = 1,
        node: int = 0,
        may_come: Callable[[], bool] = lambda: True,
        say: Callable[[str], object] = logger.warning,
    ) -> None:
        self._inputs = inputs
        self._store = store
        self._keys = keys
        self._who = who
        self._most_s = deadline_s / 2
        self._may_come = may_come
        self._say = say
        self._planners = planners
        self._node = node
        self._enough = 2 * planners
        self._on_time = self._enough
        self._made: dict[int, list[str]] = {}
        self._first_waits: list[float] = []
        self._ask_at = 0.0
        self._planned: PlannedSplits | None = None
        self._corrections: list[Correction] = []
        self._trains = {split.name: split.evaluation is None for split in inputs.splits}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def fetch(self, split: str, iteration: int, places: Sequence[Place]) -> Mapping[Place, bytes]:
        """The encoded entries of one iteration for some ranks' places.

        Raises:
            PlannerFailedError: a planner failed, or planning here did; its traceback is in the message.
            StoreError: the source is closed.
        """
        correction = self._correction(split, iteration)
        number = 0 if correction is None else correction.number
        key_of = partial(self._keys.plan, split=split, iteration=iteration, correction=number)
        maker = (iteration + 1) % self._planners  # not the node whose planner should have made it
        if self._store is not None and time.monotonic() >= self._ask_at:
            try:
                return self._stored(
                    self._store,
                    f"iteration {iteration} of {split}",
                    {key_of(replica=replica, stage=stage): (replica, stage) for replica, stage in places},
                    maker,
                )
            except StoreTimeoutError:
                made = self._plan(split, iteration)
                if maker == self._node and self._planners > 1:
                    self._share(
                        self._store,
                        iteration,
                        [(key_of(replica=replica, stage=stage), data) for (replica, stage), data in made.items()],
                    )
                return made
            except StoreError as error:
                self._check_open()
                self._give_up(error)
        return self._plan(split, iteration)

    def publish(self, correction: Correction) -> bool:
        """Tell the planners a correction before `correct`; whether they can know it."""
        if self._store is None or time.monotonic() < self._ask_at:
            return False
        try:
            self._store.put_all([(self._keys.correction(correction.number), msgspec.json.encode(correction))])
            self._store.announce(self._keys.corrections, correction.number)
        except StoreError as error:
            self._give_up(error)
            return False
        return True

    def correct(self, correction: Correction) -> None:
        """Plan with corrected costs; none of the iterations has been asked for."""
        self._corrections.append(correction)

    def _correction(self, split: str, iteration: int) -> Correction | None:
        return in_force(self._corrections, iteration) if self._trains[split] else None

    def announce(self, split: str, iteration: int) -> None:
        """Tell the planners how far training is; a store that fails shows when plans are asked for."""
        if self._store is not None and time.monotonic() >= self._ask_at:
            try:
                with suppress(StoreFullError):  # planners that find it full make room
                    self._store.announce(self._keys.progress(split), iteration)
            except StoreError as error:
                self._give_up(error)

    def close(self) -> None:
        """End the waits of other threads; nothing is planned any more."""
        self._closed.set()

    @property
    def patience_s(self) -> float:
        """How long the next plan is waited for."""
        if self._on_time < self._enough:
            return _AT_ONCE_S
        late_s = max(LATE_S, _TIMES * max(self._first_waits)) if self._first_waits else self._most_s
        return min(late_s, self._most_s)

    def _stored(self, store: Store, what: str, places: Mapping[str, Place], maker: int) -> dict[Place, bytes]:
        """The entries under some places' keys; raises StoreTimeoutError where this node has to make them."""
        started = time.monotonic()
        patience_s = self.patience_s
        try:
            entries = self._await(store, places, started + patience_s, self._may_come)
        except StoreTimeoutError:
            if self._on_time:
                makes = self._who if maker == self._node else f"node {maker}"
                waited_s = time.monotonic() - started
                self._say(f"no plan of {what} after {waited_s:.1f} s: {makes} makes it; later ones are not waited for")
            self._on_time = 0
            if maker == self._node:
                raise
            return self._await(store, places, time.monotonic() + self._most_s, lambda: True)
        self._on_time += 1
        if len(self._first_waits) < _FIRST_PLANS and patience_s > _AT_ONCE_S:
            self._first_waits.append(time.monotonic() - started)
        return entries

    def _await(
        self, store: Store, places: Mapping[str, Place], until: float, may_come: Callable[[], bool]
    ) -> dict[Place, bytes]:
        """What is published under keys; raises StoreTimeoutError where some of it is late or will not come."""
        entries: dict[Place, bytes] = {}
        for key, place in places.items():
            while place not in entries:
                self._check_open()
                left_s = max(min(until - time.monotonic(), _SLICE_S), _AT_ONCE_S)
                try:
                    name, data = store.wait_any([key, self._keys.error], timeout_s=left_s, what=f"the plan {key}")
                except StoreTimeoutError:
                    if time.monotonic() >= until or not may_come():
                        raise
                    continue
                if name != key:
                    raise decode_failure(data)
                entries[place] = data
        return entries

    def _share(self, store: Store, iteration: int, items: Sequence[tuple[str, bytes]]) -> None:
        """Publish a plan that was late, and delete those that were long ago."""
        try:
            for old in [each for each in self._made if each < iteration - _KEPT]:
                store.delete(self._made.pop(old))
            store.put_all(items)
            self._made[iteration] = [key for key, _ in items]
        except StoreError as error:
            self._give_up(error)

    def _plan(self, split: str, iteration: int) -> dict[Place, bytes]:
        with self._lock:  # one at a time: each takes a core
            self._check_open()
            try:
                if self._planned is None:
                    self._planned = PlannedSplits(self._inputs)
                entries = self._planned.entries(split, iteration, self._correction(split, iteration))
            except Exception as error:
                doing = f"planning iteration {iteration} of {split}"
                raise describe_failure(error, who=self._who, doing=doing) from error
        return {(replica, stage): data for replica, stage, data in entries}

    def _give_up(self, error: StoreError) -> None:
        self._ask_at = time.monotonic() + _ASK_AGAIN_S
        self._say(f"{error.message}; {self._who} makes plans, and asks again in {_ASK_AGAIN_S:.0f} s")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreError("the source of plans is closed: the run has ended")
