"""The planner's loop: plan ahead of training, publish, forget what training has left behind.

    kept for laggards      in training        planned ahead
├──── keep_behind ────┤────── progress ──────┤──── look_ahead ────┤
   deleted before ◄                                    ► not planned yet

Several planners of a job share the window: the first to publish its claim of an iteration plans it. Planner 0 asks for
another where training comes close to the end of what is planned.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from megatron_dynapipe.errors import StoreError, StoreTimeoutError
from megatron_dynapipe.service.failure import PlannerFailure
from megatron_dynapipe.service.settings import ServiceSettings, SplitSettings
from megatron_dynapipe.store import PlanKeys, PlanStore

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
"""How long a planner that joins looks for where training is."""


class PlanSource(Protocol):
    """Makes plans; the same arguments give the same bytes, whenever and wherever they are asked for."""

    def entries(self, split: str, iteration: int) -> Sequence[tuple[int, int, bytes]]:
        """(replica, stage, bytes) for every rank's share of one iteration."""


class _SplitState:
    """How far one split is: planned, and trained."""

    def __init__(self, split: SplitSettings, settings: ServiceSettings) -> None:
        self.name = split.name
        self.progress = split.first_iteration
        self._settings = settings
        self._end = None if split.iterations is None else split.first_iteration + split.iterations
        self.next = split.first_iteration
        self._published: deque[tuple[int, list[str]]] = deque()

    @property
    def goal(self) -> int:
        """The progress at which the next iteration may be planned."""
        return max(self.next - self._settings.look_ahead, 0)

    @property
    def is_planned(self) -> bool:
        """Whether nothing is left to plan."""
        return self._end is not None and self.next >= self._end

    def published(self, keys: list[str]) -> None:
        """The next iteration is in the store under `keys`."""
        self._published.append((self.next, keys))
        self.next += 1

    @property
    def is_short(self) -> bool:
        """Whether training has used up half of what is planned ahead, or more."""
        return self.next - self.progress <= self._settings.look_ahead // 2

    def join(self, progress: int) -> None:
        """Begin after the iteration in training."""
        self.progress = progress
        self.next = max(self.next, progress + 1)

    def left_behind(self) -> Iterator[str]:
        """Keys of iterations that training has left behind; they are not named again."""
        while self._published and self._published[0][0] < self.progress - self._settings.keep_behind:
            yield from self._published.popleft()[1]


class PlannerLoop:
    """Plans the iterations of all splits, those that no other planner has claimed, until none is left."""

    def __init__(self, settings: ServiceSettings, source: PlanSource, store: PlanStore) -> None:
        self._settings = settings
        self._source = source
        self._store = store
        self._keys: PlanKeys = settings.keys
        self._splits = [_SplitState(split, settings) for split in settings.inputs.splits]
        self._doing = "starting"
        self._planners = 1

    def run(self) -> None:
        """Plan until every split is planned.

        Any error is published for the ranks before it is raised; `StoreTimeoutError` is raised when training makes
        no progress for `idle_timeout_s`.
        """
        try:
            if self._settings.planner:
                self._join()
            while open_splits := [split for split in self._splits if not split.is_planned]:
                # The split whose next plan is needed soonest; the first in order where they tie.
                split = min(open_splits, key=lambda split: split.next - split.progress)
                if split.progress >= split.goal:
                    self._plan_next(split)
                else:
                    self._await_training(open_splits)
        except Exception as error:
            publish_failure(
                self._store, self._keys, PlannerFailure.of(error, planner=self._settings.planner, doing=self._doing)
            )
            raise

    def _plan_next(self, split: _SplitState) -> None:
        self._doing = f"claiming iteration {split.next} of {split.name}"
        claim = self._keys.claim(split.name, split.next)
        if not self._store.put_first(claim, b"%d" % self._settings.planner):
            split.published([])  # by another planner
            return
        self._doing = f"planning iteration {split.next} of {split.name}"
        entries = self._source.entries(split.name, split.next)
        self._doing = f"publishing iteration {split.next} of {split.name}"
        keys = [claim]
        for replica, stage, data in entries:
            keys.append(self._keys.plan(split=split.name, iteration=split.next, replica=replica, stage=stage))
            self._store.put(keys[-1], data)
        split.published(keys)

    def _await_training(self, splits: Sequence[_SplitState]) -> None:
        self._doing = "waiting for training: " + ", ".join(f"{split.name} at {split.progress}" for split in splits)
        by_topic = {self._keys.progress(split.name): split for split in splits}
        reached = self._store.wait_progress(
            {topic: split.goal for topic, split in by_topic.items()},
            timeout_s=self._settings.idle_timeout_s,
            what="training to go on",
        )
        for topic, progress in reached.items():
            by_topic[topic].progress = progress
            self._store.delete(list(by_topic[topic].left_behind()))
            if by_topic[topic].is_short:
                self._ask_for_another()

    def _ask_for_another(self) -> None:
        """Planner 0, for all: another planner, unless the job has as many as it may have."""
        if self._settings.planner == 0 and self._planners < self._settings.most_planners:
            self._planners += 1
            logger.info("training comes close to what is planned: asking for planner %d", self._planners - 1)
            self._store.announce(self._keys.planners, self._planners)

    def _join(self) -> None:
        """Find out how far training is, which other planners have planned for so far."""
        self._doing = "looking for where training is"
        by_topic = {self._keys.progress(split.name): split for split in self._splits}
        for topic, split in by_topic.items():
            try:
                reached = self._store.wait_progress({topic: 0}, timeout_s=_LOOK_S, what="training to begin")
            except StoreTimeoutError:
                continue
            split.join(reached[topic])


def publish_failure(store: PlanStore, keys: PlanKeys, failure: PlannerFailure) -> None:
    """Publish a failure for all ranks, unless one was before; a store that is gone shows on every rank by itself."""
    try:
        store.put_first(keys.error, failure.encode())
    except StoreError as error:
        logger.warning("cannot publish what went wrong: %s", error)
