"""The planner's loop: plan ahead of training, publish, delete what training has left behind.

    kept for laggards       in training          planned ahead
├──── keep_behind ────┤────── progress ──────┤──── look_ahead ────┤
   deleted before ◄

Of P planners, planner p plans the iterations i with i mod P = p, as many at once as it has cores, and publishes them in
the order in which training needs them. Nothing depends on it: a plan is a pure function, which nodes make themselves
where it is late (`source`).
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from megatron_dynapipe.core.errors import DynaPipeError, StoreError, StoreFullError, StoreTimeoutError
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.service.corrections import Correction, in_force
from megatron_dynapipe.service.failure import describe_failure, publish_failure
from megatron_dynapipe.service.over_rows import ComparedSplits
from megatron_dynapipe.service.settings import LEAST_AHEAD, ServiceSettings, SplitSettings
from megatron_dynapipe.store import Store

logger = logging.getLogger(__name__)
_LOOK_S = 5.0
"""How long a planner without work, room or a store waits before it looks again."""


type Entry = tuple[int, int, bytes]
"""(replica, stage, the encoded part of the plan)."""


def look_ahead(needed: float) -> int:
    """How many iterations to plan ahead where so many cores keep up: a plan may take twice as long as the first one."""
    return max(LEAST_AHEAD, LEAST_AHEAD // 2 + math.ceil(2 * needed))


class SplitWindow:
    """How far one split is, as one planner knows it.

    Attributes:
        trains: whether it is trained on, not evaluated.
        first: the iteration that this start begins with.
        progress: the iteration in training.
        look_ahead: how many iterations beyond it are planned.
        published: iterations that this planner has published and not deleted.
    """

    def __init__(self, split: SplitSettings, settings: ServiceSettings) -> None:
        self.name = split.name
        self.trains = split.evaluation is None
        self.progress = self.first = split.first_iteration
        self.look_ahead = settings.look_ahead or LEAST_AHEAD
        self.published: set[int] = set()
        self._settings = settings
        self._end = None if split.iterations is None else self.first + split.iterations

    @property
    def reach(self) -> int:
        """The first iteration that is not to be planned yet."""
        return self.progress + self.look_ahead + 1

    @property
    def unplanned(self) -> list[int]:
        """Iterations of this planner from the one in training on that are not published."""
        return [i for i in self._own(self.progress) if i not in self.published]

    @property
    def is_planned(self) -> bool:
        """Whether nothing is left to plan, now or later."""
        return self._end is not None and self._end <= self.reach and not self.unplanned

    @property
    def published_or_begun(self) -> set[int]:
        """Iterations of this planner that may be in the store: published ones, and those that it may not know of.

        A store that was out of reach has hidden what became of them, and an end may come between two keys.
        """
        return self.published.union(self._own(max(self.progress - self._settings.keep_behind, 0)))

    def _own(self, first: int) -> range:
        """Iterations of this planner, from one on, as far as it may plan."""
        end = self.reach if self._end is None else min(self.reach, self._end)
        planners = self._settings.planners
        return range(first + (self._settings.planner - first) % planners, end, planners)

    def left_behind(self) -> list[int]:
        """Published iterations that training has left behind; they are not named again."""
        old = sorted(i for i in self.published if i < self.progress - self._settings.keep_behind)
        self.published.difference_update(old)
        return old


class PlannerLoop:
    """Plans the iterations of all splits that are one planner's, until all are planned."""

    def __init__(self, settings: ServiceSettings, source: ComparedSplits, store: Store) -> None:
        self._settings = settings
        self._source = source
        self._store = store
        self._keys = settings.keys
        self._splits = [SplitWindow(split, settings) for split in settings.inputs.splits]
        self._corrections: list[Correction] = []
        self._pool = ThreadPoolExecutor(settings.cores, thread_name_prefix="planner")
        self._doing = "starting"
        self._said: list[str] = []
        self._has_compared = False
        self._looked_at = 0  # the last correction that might suit another layer split
        self._moved = time.monotonic()

    def run(self) -> None:
        """Plan until every split is planned.

        An error of planning is published for the ranks before it is raised. While the store is out of reach the planner
        waits; it raises `StoreTimeoutError` when training makes no progress for `idle_timeout_s`.
        """
        try:
            while not self._step():
                pass
        except StoreTimeoutError:
            raise
        except Exception as error:
            failure = describe_failure(error, who=f"planner {self._settings.planner}", doing=self._doing)
            publish_failure(self._store, self._keys, failure)
            raise

    def _step(self) -> bool:
        """Plan and publish an iteration for every core, or wait for training; whether all is planned."""
        try:
            self._look()
            if all(split.is_planned for split in self._splits):
                self._say_gain()
                return True
            waiting = [(split, iteration) for split in self._splits for iteration in split.unplanned]
            waiting.sort(key=lambda pair: pair[1] - pair[0].progress)
            if not waiting:
                self._prepare()
                self._say_gain()
                self._await_training()
            else:
                self._plan(waiting[: self._settings.cores])
        except StoreFullError as error:
            logger.info("%s; planning goes on with training", error)
            self._await_training()
        except StoreTimeoutError:
            raise
        except StoreError as error:
            logger.warning("%s", error)
            for split in self._splits:
                split.published.clear()  # it may come back empty
            self._check_idle()
            time.sleep(_LOOK_S)
        return False

    def _prepare(self) -> None:
        """Plan what the next plans follow, before these are asked for."""
        for split in self._splits:
            if split.trains:
                self._doing = "planning what later plans follow"
                correction = self._correction(split, split.reach)
                self._source.following(split.name, correction)
                if correction is not None and correction.number > self._looked_at and not self._settings.planner:
                    self._say_split(split, correction)

    def _say_split(self, split: SplitWindow, correction: Correction) -> None:
        """Once: the layer split that suits what passes take better than the run's own."""
        self._doing = "planning other layer splits"
        self._looked_at = correction.number
        try:
            better = self._source.better_split(split.name, correction)
        except DynaPipeError as error:
            logger.info("other layer splits cannot be planned: %s", error)
            return
        if better:
            self._looked_at = sys.maxsize
            self._say(better)

    def _say_gain(self) -> None:
        """Once, when a run's first plans are published: what they gain over packed rows."""
        if self._has_compared or self._settings.planner:
            return
        self._has_compared = True
        self._doing = "predicting packed rows"
        try:
            gain = self._source.over_rows()
        except DynaPipeError as error:
            gain = f"plans cannot be compared with packed rows: {error}"
        self._say(gain)

    def _say(self, line: str) -> None:
        """In this planner's log, and at the end of the run's, where this is its first planner that has compared."""
        if line:
            logger.info("%s", line)
            self._said.append(line)
        if self._has_compared:
            self._store.delete([self._keys.gain])  # a key that is taken keeps what it holds
            self._store.put_all([(self._keys.gain, "\n".join(self._said).encode())])

    def close(self) -> None:
        """Delete what this planner may have published, where the server does not end with the job.

        Planner 0 deletes how far training is, too. A store that is out of reach lets all of it expire.
        """
        if self._settings.retention_s is None:
            return
        keys = [key for split in self._splits for i in split.published_or_begun for key in self._keys_of(split, i)]
        if self._settings.planner == 0:
            known = range(1, len(self._corrections) + 1)
            keys += [self._keys.corrections, *map(self._keys.correction, known)]
            keys += [self._keys.ahead, self._keys.gain, *(self._keys.progress(split.name) for split in self._splits)]
        try:
            self._store.delete(keys)
        except StoreError as error:
            logger.warning("%s", error)

    def _look(self) -> None:
        """Read how far training is; delete what it has left behind."""
        self._doing = "looking for where training is"
        topics = {split.name: self._keys.progress(split.name) for split in self._splits}
        progress = self._store.read_progress([*topics.values(), self._keys.corrections, self._keys.ahead])
        for number in range(len(self._corrections) + 1, progress.get(self._keys.corrections, 0) + 1):
            _, data = self._store.wait_any([self._keys.correction(number)], timeout_s=_LOOK_S, what="a correction")
            self._corrections.append(msgspec.json.decode(data, type=Correction))
        for split in self._splits:
            if split.trains:
                split.look_ahead = max(split.look_ahead, progress.get(self._keys.ahead, 0))
            reached = progress.get(topics[split.name], 0)
            if reached > split.progress:
                split.progress = reached
                self._moved = time.monotonic()
            self._store.delete([key for i in split.left_behind() for key in self._keys_of(split, i)])

    def _plan(self, waiting: Sequence[tuple[SplitWindow, int]]) -> None:
        """Plan iterations at once, and publish every one once those before it are published."""
        planned = self._pool.map(
            lambda pair: self._source.entries(pair[0].name, pair[1], self._correction(*pair)), waiting
        )
        for split, iteration in waiting:
            self._doing = f"planning iteration {iteration} of {split.name}"
            entries = next(planned)
            if iteration == split.first and split.trains and self._settings.look_ahead is None:
                self._set_pace()
            self._publish(split, iteration, entries)

    def _set_pace(self) -> None:
        """Tell all planners how far ahead to plan, by how long the first plan took."""
        needed, there = self._source.needed, self._settings.planners * self._settings.cores
        ahead = look_ahead(needed)
        self._store.announce(self._keys.ahead, ahead)
        lacking = "" if needed <= there else "; training will wait for plans: raise --dynapipe-planner-cores"
        cores = f"{needed:.1f} of the job's {amount(there, 'core')} would keep up"
        self._say(f"planning: {cores}, {ahead} iterations ahead{lacking}")

    def _correction(self, split: SplitWindow, iteration: int) -> Correction | None:
        return in_force(self._corrections, iteration) if split.trains else None

    def _publish(self, split: SplitWindow, iteration: int, entries: Sequence[Entry]) -> None:
        self._doing = f"publishing iteration {iteration} of {split.name}"
        key = self._key(split, iteration)
        items = [(key(replica=replica, stage=stage), data) for replica, stage, data in entries]
        try:
            self._store.put_all(items)
        except StoreFullError:
            self._store.delete([key for key, _ in items])  # ranks announce their progress in this room
            raise
        split.published.add(iteration)

    def _await_training(self) -> None:
        """Wait until training goes on, for some seconds at most."""
        places = ", ".join(f"{split.name} at {split.progress}" for split in self._splits)
        self._doing = f"waiting for training: {places}"
        self._check_idle()
        goals = {self._keys.progress(split.name): split.progress + 1 for split in self._splits}
        goals[self._keys.ahead] = max(split.look_ahead for split in self._splits) + 1
        left_s = self._moved + self._settings.idle_timeout_s - time.monotonic()
        try:
            self._store.wait_progress(goals, timeout_s=max(min(_LOOK_S, left_s), 0.001), what="training to go on")
        except StoreTimeoutError:
            self._check_idle()

    def _check_idle(self) -> None:
        """Raise StoreTimeoutError where training has made no progress for too long."""
        if time.monotonic() >= self._moved + self._settings.idle_timeout_s:
            raise StoreTimeoutError(
                f"waited {self._settings.idle_timeout_s:g} s for training to go on",
                hint="a rank may hang: look at its output",
            )

    def _keys_of(self, split: SplitWindow, iteration: int) -> list[str]:
        layout = self._settings.inputs.planner
        key = self._key(split, iteration)
        return [
            key(replica=replica, stage=stage)
            for replica in range(layout.data_parallel)
            for stage in range(layout.pipeline_parallel)
        ]

    def _key(self, split: SplitWindow, iteration: int) -> Callable[..., str]:
        correction = self._correction(split, iteration)
        number = 0 if correction is None else correction.number
        return partial(self._keys.plan, split=split.name, iteration=iteration, correction=number)
