"""The planner's loop: plan ahead of training, publish, forget what training has left behind.

Several planners of a job share the window (`window`): the first to claim an iteration plans it, within a lease. One
that dies, hangs or is cut off loses its lease, and another plans the iteration: the same bytes, so that two of them
do no harm. Planner 0 asks for another where training comes close to the end of what is planned.

A store that was out of reach may have come back empty: every planner then looks at its window again, and what is not
there is planned and published again.
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from megatron_dynapipe.errors import StoreError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.service.failure import PlannerFailure
from megatron_dynapipe.service.figures import Clock, PlannerFigures
from megatron_dynapipe.service.settings import ServiceSettings
from megatron_dynapipe.service.window import SplitWindow
from megatron_dynapipe.store import PlanKeys, PlanStore

logger = logging.getLogger(__name__)

_SLICE_S = 5.0
"""How long a planner waits before it looks at others' leases, and whether the store was out of reach."""
_LEASE_PLANS = 4
"""A lease is at least this many times as long as the slowest iteration took to plan."""
_FULL_S = 0.1
"""Between two attempts to publish the iteration that training needs next in a full store."""


class PlanSource(Protocol):
    """Makes plans; the same arguments give the same bytes, whenever and wherever they are asked for."""

    def entries(self, split: str, iteration: int) -> Sequence[tuple[int, int, bytes]]:
        """(replica, stage, bytes) for every rank's share of one iteration."""


class PlannerLoop:
    """Plans the iterations of all splits, those that no other planner has claimed, until none is left."""

    def __init__(self, settings: ServiceSettings, source: PlanSource, store: PlanStore) -> None:
        self._settings = settings
        self._source = source
        self._store = store
        self._keys: PlanKeys = settings.keys
        self._owner = b"%d" % settings.planner
        self._splits = [SplitWindow(split, settings) for split in settings.inputs.splits]
        self._doing = "starting"
        self._planners = 1
        self._lease_s = settings.lease_s
        self._interruptions = store.interruptions
        self._looked = self._moved = time.monotonic()
        self._clock = Clock()
        self.figures = PlannerFigures(planner=settings.planner)

    def run(self) -> None:
        """Plan until every split is planned.

        Any error is published for the ranks before it is raised; `StoreTimeoutError` is raised when training makes
        no progress for `idle_timeout_s`.
        """
        try:
            self._join()
            while open_splits := [split for split in self._splits if not split.is_planned]:
                self._look_around(open_splits)
                self._report()
                # The split whose next plan is needed soonest; the first in order where they tie.
                with_room = [split for split in open_splits if split.has_room]
                if with_room:
                    split = min(with_room, key=lambda split: split.next - split.progress)
                    if self._plan(split, split.next):
                        split.next += 1
                elif any(not split.is_planned for split in open_splits):
                    self._await_training([split for split in open_splits if not split.is_planned])
        except Exception as error:
            publish_failure(
                self._store, self._keys, PlannerFailure.of(error, planner=self._settings.planner, doing=self._doing)
            )
            raise

    def _plan(self, split: SplitWindow, iteration: int) -> bool:
        """Plan and publish an iteration that no other planner has claimed; False where the store has no room for it."""
        self._doing = f"claiming iteration {iteration} of {split.name}"
        claim, done = self._keys.claim(split.name, iteration), self._keys.done(split.name, iteration)
        is_ours = self._store.claim(claim, self._owner, lease_s=self._lease_s)
        if found := self._store.read_progress([done]):  # after the claim: a lease may end once all is published
            split.published(iteration, found[done])
            return True
        if not is_ours:
            split.claimed_by_another(iteration)
            return True
        self.figures.taken_over += iteration in split.others
        started = time.monotonic()
        self._doing = f"planning iteration {iteration} of {split.name}"
        entries = self._source.entries(split.name, iteration)
        self._doing = f"publishing iteration {iteration} of {split.name}"
        if not self._publish(split, iteration, entries):
            return False
        took_s = time.monotonic() - started
        self.figures.leases_lost += took_s > self._lease_s
        self._lease_s = max(self._lease_s, _LEASE_PLANS * took_s)
        self.figures.planned += 1
        self.figures.planning_ns += round(took_s * 1e9)
        return True

    def _publish(self, split: SplitWindow, iteration: int, entries: Sequence[tuple[int, int, bytes]]) -> bool:
        """Put all plans of an iteration into the store; False to try again once training has moved on."""
        items = [
            (self._keys.plan(split=split.name, iteration=iteration, replica=replica, stage=stage), data)
            for replica, stage, data in entries
        ]
        size = sum(len(data) for _, data in items)
        given_up = time.monotonic() + self._settings.full_timeout_s
        while True:
            try:
                before = self._store.interruptions
                self._store.put_all(items)
                self._store.announce(self._keys.done(split.name, iteration), size)
                if self._store.interruptions == before:
                    break  # else it may have come back empty in between: told that plans are there that are not
            except StoreFullError:
                self.figures.store_full += 1
                self._store.delete([key for key, _ in items])  # training announces its progress in this room
                if iteration > split.progress + 1:
                    split.bytes_limit = max(split.bytes_ahead, 1)
                    logger.info("the store is full: planning %d bytes ahead of %s", split.bytes_limit, split.name)
                    return False
                self._forget(split)
                if time.monotonic() > given_up:
                    raise
                time.sleep(_FULL_S)
        split.published(iteration, size)
        self.figures.published_bytes += size
        return True

    def _await_training(self, splits: Sequence[SplitWindow]) -> None:
        self._doing = "waiting for training: " + ", ".join(f"{split.name} at {split.progress}" for split in splits)
        by_topic = {self._keys.progress(split.name): split for split in splits}
        by_done = {self._keys.done(split.name, each): (split, each) for split in splits for each in split.others}
        goals = {topic: max(split.goal, split.progress + 1) for topic, split in by_topic.items()}
        started = time.monotonic()
        left_s = self._moved + self._settings.idle_timeout_s - started
        try:
            reached = self._store.wait_progress(
                goals | dict.fromkeys(by_done, 0), timeout_s=max(min(_SLICE_S, left_s), 0.001), what="training to go on"
            )
        except StoreTimeoutError:
            if left_s > _SLICE_S:
                return
            raise StoreTimeoutError(
                f"waited {self._settings.idle_timeout_s:g} s for training to go on",
                hint="a rank may hang: look at its output",
            ) from None
        finally:
            self.figures.waits_ns += round((time.monotonic() - started) * 1e9)
        self._moved = time.monotonic()
        for topic, value in reached.items():
            if topic in by_done:
                split, iteration = by_done[topic]
                split.published(iteration, value)
                continue
            by_topic[topic].reach(value)
            self._forget(by_topic[topic])
            if by_topic[topic].is_short:
                self._ask_for_another()

    def _forget(self, split: SplitWindow) -> None:
        """Delete what training has left behind, whoever published it."""
        layout = self._settings.inputs.planner
        for iteration in split.left_behind():
            keys = [
                self._keys.plan(split=split.name, iteration=iteration, replica=replica, stage=stage)
                for replica in range(layout.data_parallel)
                for stage in range(layout.pipeline_parallel)
            ]
            done = self._keys.done(split.name, iteration)
            self._store.delete([self._keys.claim(split.name, iteration), *keys, done])

    def _look_around(self, splits: Sequence[SplitWindow]) -> None:
        """Now and then: was the store out of reach, has another planner lost its lease?"""
        if (now := self._store.interruptions) != self._interruptions:
            self.figures.interruptions += now - self._interruptions
            self._interruptions = now
            logger.info("the store was out of reach: looking at the window again")
            for split in splits:
                split.look_again()
        if time.monotonic() - self._looked < min(_SLICE_S, self._settings.lease_s):
            return
        self._looked = time.monotonic()
        for split in splits:
            for iteration in sorted(split.others):
                self._plan(split, iteration)

    def _ask_for_another(self) -> None:
        """Planner 0, for all: another planner, unless the job has as many as it may have."""
        if self._settings.planner == 0 and self._planners < self._settings.most_planners:
            self._planners += 1
            logger.info("training comes close to what is planned: asking for planner %d", self._planners - 1)
            self._store.announce(self._keys.planners, self._planners)

    def _join(self) -> None:
        """Find out how far training is: other planners, or this one before it died, have planned for so far."""
        self._doing = "looking for where training is"
        by_topic = {self._keys.progress(split.name): split for split in self._splits}
        for topic, progress in self._store.read_progress(list(by_topic)).items():
            by_topic[topic].join(progress)
        self._planners = self._store.read_progress([self._keys.planners]).get(self._keys.planners, 1)

    def _report(self) -> None:
        """Figures to the store and to the log, now and then; a store that is full goes without."""
        if self._clock.report_due():
            self.figures.window_iterations = self._splits[0].depth
            self.figures.window_bytes = self._splits[0].bytes_ahead
            try:
                self._store.put_latest(self._keys.figures(self._settings.planner), msgspec.json.encode(self.figures))
            except StoreFullError:
                logger.info("the store is full: it takes no figures")
        if self._clock.line_due():
            logger.info("%s", self.figures.as_line())


def publish_failure(store: PlanStore, keys: PlanKeys, failure: PlannerFailure) -> None:
    """Publish a failure for all ranks, unless one was before; a store that is gone shows on every rank by itself."""
    try:
        store.put_first(keys.error, failure.encode())
    except StoreError as error:
        logger.warning("cannot publish what went wrong: %s", error)
