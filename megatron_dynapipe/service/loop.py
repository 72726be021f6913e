"""The planner's loop: plan ahead of training, publish, delete what training has left behind.

    kept for laggards       in training          planned ahead
├──── keep_behind ────┤────── progress ──────┤─── near half ───┤─── look_ahead, and at most so many bytes ──┤
   deleted before ◄                            any planner's                    its own planner's

Of P planners, planner p plans the iterations i with i mod P = p. One that has planned all that is its own plans what is
not there in the near half of the window, too: another planner hangs, or is slow. Plans are pure functions, so that two
planners that plan the same iteration publish the same bytes.

What is published, and how far training is, each planner reads from the store before every plan. So a planner that
starts again goes on where it was, and a store that has come back empty is filled again.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_dynapipe.errors import StoreFullError, StoreTimeoutError
from megatron_dynapipe.plan.codec import encode_entries
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.sampling import LengthTable, Sampler, read_task_ids
from megatron_dynapipe.service.client import PlannerFailure, publish_failure
from megatron_dynapipe.service.settings import PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.store import PlanKeys, PlanStore

logger = logging.getLogger(__name__)


class PlannedSplits:
    """Plans of a dataset on disk: the same arguments give the same bytes, whenever and wherever they are asked for."""

    def __init__(self, inputs: PlanInputs) -> None:
        """Read lengths and costs.

        Args:
            inputs: what plans are made from.

        Raises:
            DataError: the dataset is missing or damaged, or holds samples that are too long.
            CostModelError: the cost model is damaged or does not fit the settings.
            InfeasibleError: the model alone does not fit.
        """
        self._planner = Planner(inputs.planner, inputs.costs.load())
        self._forward_only = {split.name: split.forward_only for split in inputs.splits}
        self._samplers = {split.name: split_sampler(Path(inputs.data_folder), split) for split in inputs.splits}
        for name, sampler in self._samplers.items():
            logger.info("%s: %s", name, sampler.report)

    def entries(self, split: str, iteration: int) -> Sequence[tuple[int, int, bytes]]:
        """(replica, stage, bytes) for every rank's share of one iteration."""
        batch = self._samplers[split].batch(iteration)
        return encode_entries(self._planner.plan(batch, iteration, forward_only=self._forward_only[split]))


def split_sampler(folder: Path, split: SplitSettings) -> Sampler:
    """The sampler of a split of a dataset folder; raises DataError and ConfigError as it does."""
    lengths = LengthTable.read(folder, split.name)
    tasks = read_task_ids(folder, split.name, len(lengths)) if split.sampler.task_rates else None
    return Sampler(lengths, split.sampler, tasks)


_LOOK_S = 5.0
"""How long a planner without work waits before it reads again what is published."""
_FULL_S = 0.1
"""Between two attempts to publish the iteration that training needs next in a full store."""


class SplitWindow:
    """How far one split is, as one planner knows it.

    Attributes:
        name: of the split.
        progress: the iteration in training.
        sizes: bytes of every iteration of the window whose plans are published.
        bytes_limit: of plans ahead of training; lowered where the store is full, raised again as training goes on.
    """

    def __init__(self, split: SplitSettings, settings: ServiceSettings) -> None:
        self.name = split.name
        self.progress = split.first_iteration
        self.sizes: dict[int, int] = {}
        self.bytes_limit = self._most_bytes = settings.look_ahead_bytes
        self._settings = settings
        self._end = None if split.iterations is None else split.first_iteration + split.iterations
        self._oldest = split.first_iteration
        self._published: set[int] = set()

    @property
    def window(self) -> range:
        """Iterations whose plans may be in the store."""
        end = self.progress + self._settings.look_ahead + 1
        return range(self.progress, end if self._end is None else min(end, self._end))

    @property
    def is_planned(self) -> bool:
        """Whether nothing is left to plan."""
        return self._end is not None and self.window.stop == self._end and not self.missing

    @property
    def missing(self) -> list[int]:
        """Iterations of the window that are not published."""
        return [iteration for iteration in self.window if iteration not in self.sizes]

    @property
    def bytes_ahead(self) -> int:
        """Bytes of the plans from the iteration in training on."""
        return sum(self.sizes.values())

    def own(self) -> int | None:
        """The next iteration that is this planner's to plan, if there is room for it."""
        planner, planners = self._settings.planner, self._settings.planners
        return self._first([iteration for iteration in self.missing if iteration % planners == planner])

    def late(self) -> int | None:
        """The next iteration that is about to be late, whoever's it is, if there is room for it."""
        near = self.progress + max(self._settings.look_ahead // 2, 1)
        return self._first([iteration for iteration in self.missing if iteration <= near])

    def _first(self, iterations: Sequence[int]) -> int | None:
        """The first one, where one as large as the largest fits; the next in training always may be planned."""
        if not iterations:
            return None
        fits = self.bytes_ahead + max(self.sizes.values(), default=0) <= self.bytes_limit
        return iterations[0] if fits or iterations[0] <= self.progress + 1 else None

    def reach(self, progress: int) -> bool:
        """Training has come so far; whether that is further than it was."""
        if progress <= self.progress:
            return False
        self.progress = progress  # a store that was full may have been filled by another job
        self.bytes_limit = min(self.bytes_limit + self.bytes_limit // 16 + 1, self._most_bytes)
        return True

    def add(self, iteration: int, size: int) -> None:
        """Take note of an iteration that this planner has published, of so many bytes."""
        self.sizes[iteration] = size
        self._published.add(iteration)

    def left_behind(self) -> list[int]:
        """Iterations that training has left behind; they are not named again.

        Those that others have published, too, as far as they can be there: a planner that was overtaken by more than a
        window was overtaken by planners that have deleted them.
        """
        end = max(self.progress - self._settings.keep_behind, self._oldest)
        start = max(self._oldest, end - self._settings.look_ahead)
        found = sorted({*range(start, end), *(each for each in self._published if each < end)})
        self._oldest = end
        self._published.difference_update(found)
        return found


class PlannerLoop:
    """Plans the iterations of all splits that are one planner's, until all are planned."""

    def __init__(self, settings: ServiceSettings, source: PlannedSplits, store: PlanStore) -> None:
        self._settings = settings
        self._source = source
        self._store = store
        self._keys: PlanKeys = settings.keys
        self._splits = [SplitWindow(split, settings) for split in settings.inputs.splits]
        self._doing = "starting"
        self._moved = time.monotonic()

    def run(self) -> None:
        """Plan until every split is planned.

        Any error is published for the ranks before it is raised; `StoreTimeoutError` is raised when training makes
        no progress for `idle_timeout_s`.
        """
        try:
            while True:
                self._look()
                if all(split.is_planned for split in self._splits):
                    return
                if not self._plan_next():
                    self._await_training()
        except Exception as error:
            failure = PlannerFailure.of(error, planner=self._settings.planner, doing=self._doing)
            publish_failure(self._store, self._keys, failure)
            raise

    def _look(self) -> None:
        """Read how far training is and what is published; delete what training has left behind."""
        self._doing = "looking for where training is"
        topics = {split.name: self._keys.progress(split.name) for split in self._splits}
        progress = self._store.read_progress(list(topics.values()))
        for split in self._splits:
            if split.reach(progress.get(topics[split.name], 0)):
                self._moved = time.monotonic()
            done = {self._keys.done(split.name, iteration): iteration for iteration in split.window}
            split.sizes = {done[topic]: size for topic, size in self._store.read_progress(list(done)).items()}
            self._delete_left_behind(split)

    def _plan_next(self) -> bool:
        """Plan what training needs soonest, first of this planner's own; False where there is nothing to plan."""
        for wanted in (SplitWindow.own, SplitWindow.late):
            found = [(split, iteration) for split in self._splits if (iteration := wanted(split)) is not None]
            if found:
                self._plan(*min(found, key=lambda each: each[1] - each[0].progress))
                return True
        return False

    def _plan(self, split: SplitWindow, iteration: int) -> None:
        if iteration % self._settings.planners != self._settings.planner:
            logger.info("iteration %d of %s of another planner is about to be late", iteration, split.name)
        self._doing = f"planning iteration {iteration} of {split.name}"
        entries = self._source.entries(split.name, iteration)
        self._doing = f"publishing iteration {iteration} of {split.name}"
        self._publish(split, iteration, entries)

    def _publish(self, split: SplitWindow, iteration: int, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Put all plans of an iteration into the store; in a full one, only if training needs it next."""
        items = [
            (self._keys.plan(split=split.name, iteration=iteration, replica=replica, stage=stage), data)
            for replica, stage, data in entries
        ]
        size = sum(len(data) for _, data in items)
        done = self._keys.done(split.name, iteration)
        given_up = time.monotonic() + self._settings.full_timeout_s
        while True:
            try:
                before = self._store.interruptions
                self._store.put_all(items)
                self._store.announce(done, size)
                if self._store.interruptions == before:
                    return split.add(iteration, size)
                # It may have come back empty in between, and would say that plans are there that are not.
            except StoreFullError:
                if self._store.read_progress([done]):  # another planner has published it
                    return None
                self._store.delete([key for key, _ in items])  # training announces its progress in this room
                if iteration > split.progress + 1:
                    split.bytes_limit = max(split.bytes_ahead, 1)
                    logger.info("the store is full: planning %d bytes ahead of %s", split.bytes_limit, split.name)
                    return None
                self._delete_left_behind(split)
                if time.monotonic() > given_up:
                    raise
                time.sleep(_FULL_S)

    def _await_training(self) -> None:
        """Wait until training goes on, or another planner publishes; for some seconds at most."""
        places = ", ".join(f"{split.name} at {split.progress}" for split in self._splits)
        self._doing = f"waiting for training: {places}"
        goals = {self._keys.progress(split.name): split.progress + 1 for split in self._splits}
        for split in self._splits:
            goals |= {self._keys.done(split.name, iteration): 0 for iteration in split.missing}
        left_s = self._moved + self._settings.idle_timeout_s - time.monotonic()
        try:
            self._store.wait_progress(goals, timeout_s=max(min(_LOOK_S, left_s), 0.001), what="training to go on")
        except StoreTimeoutError:
            if left_s <= _LOOK_S:
                raise StoreTimeoutError(
                    f"waited {self._settings.idle_timeout_s:g} s for training to go on",
                    hint="a rank may hang: look at its output",
                ) from None

    def _delete_left_behind(self, split: SplitWindow) -> None:
        """Delete the plans that training has left behind, whoever published them."""
        layout = self._settings.inputs.planner
        for iteration in split.left_behind():
            keys = [
                self._keys.plan(split=split.name, iteration=iteration, replica=replica, stage=stage)
                for replica in range(layout.data_parallel)
                for stage in range(layout.pipeline_parallel)
            ]
            self._store.delete([*keys, self._keys.done(split.name, iteration)])
