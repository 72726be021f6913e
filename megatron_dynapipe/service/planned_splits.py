"""Plans of a dataset on disk, as the planner process makes them, and any node where it is late."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.choosing.precedents import precedents_of
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.digests import file_digest
from megatron_dynapipe.sampling import LengthTable, Sampler, SpanTable, read_task_ids
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings
from megatron_dynapipe.store.codec import encode_entries

logger = logging.getLogger(__name__)

FOLLOWED = 3
"""First training batches of a run, whose plans all later ones follow (`choosing.precedents`)."""

_DRAWN_BY = (".idx", ".ends.npy", ".tasks.npy", ".spans.npy")
"""Ends of the names of files by which samples are drawn: lengths and ends, tasks, what is learned of inputs."""


class PlannedSplits:
    """Plans of a dataset on disk: the same arguments give the same bytes, whenever and wherever they are asked for.

    Safe to use from several threads: planning leaves the interpreter to others for most of its time.

    Attributes:
        needed: cores that keep up with training, by the first plan's processor time and predicted iteration; 0 before.
    """

    def __init__(self, inputs: PlanInputs) -> None:
        """Read lengths and costs.

        Raises:
            DataError: the dataset is missing or damaged, holds samples that are too long, or is not the one that the
                run began with.
            CostModelError: the cost model is damaged or does not fit the settings.
            InfeasibleError: the model alone does not fit.
        """
        self._inputs = inputs
        self.needed = 0.0
        self._planner = planner_of(inputs.planner, inputs.costs.load())
        self._following: dict[int, Planner] = {}
        self._evaluations = {split.name: split.evaluation for split in inputs.splits}
        self._first = {split.name: split.first_iteration for split in inputs.splits}
        self._samplers = {split.name: split_sampler(Path(inputs.data_folder), split) for split in inputs.splits}
        self._drawing = threading.Lock()
        check_unchanged(inputs)  # after they were opened: a folder that is replaced later does not matter
        for name, sampler in self._samplers.items():
            logger.info("%s: %s", name, sampler.report)

    def entries(
        self, split: str, iteration: int, correction: Correction | None = None
    ) -> Sequence[tuple[int, int, bytes]]:
        """(replica, stage, bytes) for every rank's share of one iteration."""
        sampler = self._samplers[split]
        evaluation = self._evaluations[split]
        place = iteration
        if evaluation is not None:
            place = iteration % evaluation % (sampler.batches.count or evaluation)
        with self._drawing:  # samplers keep what they have drawn
            batch = sampler.batch(place)
        if evaluation is not None or (iteration < FOLLOWED and correction is None):
            planner = self._planner
        else:
            planner = self.following(split, correction)
        began = time.thread_time()
        plan = planner.plan(batch, iteration, forward_only=evaluation is not None)
        if evaluation is None and not self.needed:
            self.needed = (time.thread_time() - began) * 1e9 / plan.totals.predicted_ns
        return encode_entries(plan)

    def following(self, split: str, correction: Correction | None) -> Planner:
        """A planner of these costs whose plans follow the run's first ones, kept for later iterations.

        What plans of corrected costs follow, follows the first ones itself, which takes a part of the time; nothing
        does where those cannot be followed.
        """
        number = 0 if correction is None else correction.number
        with self._drawing:
            if not self._following:
                self._following[0] = self._after_firsts(self._planner, split)
            if number not in self._following and correction is not None:
                first = self._following[0]
                settings = msgspec.structs.replace(first.settings, corrections=correction.percents)
                planner = planner_of(settings, self._inputs.costs.load())
                if any(rows for _, rows in settings.precedents):
                    planner = self._after_firsts(planner, split)
                self._following[number] = planner
                if number > 2:  # iterations are still planned with the one before
                    self._following.pop(number - 2, None)
            return self._following[number]

    def _after_firsts(self, planner: Planner, split: str) -> Planner:
        """A planner whose plans follow this one's of the split's first batches."""
        firsts, _ = batches_from_first(self._inputs, split, FOLLOWED)
        return planner.changed(precedents=precedents_of(planner, firsts))


def batches_from_first(inputs: PlanInputs, split: str, count: int) -> tuple[list[GlobalBatch], int]:
    """A split's first batches, wherever this start begins, at most so many; and the samples of an epoch."""
    settings = next(each.sampler for each in inputs.splits if each.name == split)
    sampler = split_sampler(Path(inputs.data_folder), SplitSettings(name=split, sampler=settings))
    most = sampler.batches.count
    batches = [sampler.batch(iteration) for iteration in range(count if most is None else min(count, most))]
    return batches, sampler.samples_per_epoch


def drawn_by(files: Mapping[str, str]) -> dict[str, str]:
    """The digests, by name, of those files of a dataset by which samples are drawn."""
    return {name: digest for name, digest in files.items() if name.endswith(_DRAWN_BY)}


def check_unchanged(inputs: PlanInputs) -> None:
    """Raise a DataError where a file by which samples are drawn is not the one that the run began with."""
    folder = Path(inputs.data_folder)
    for name, began_with in inputs.files.items():
        path = folder / name
        digest = file_digest(path) if path.exists() else "none"
        if digest != began_with:
            raise DataError(
                f"expected the dataset {folder} that the run began with, found another: the digest of {name} is"
                f" {digest}, it was {began_with}",
                hint="prepare a dataset in a new folder while a run reads this one; the run goes on from its last"
                " checkpoint with the dataset that it began with",
            )


def split_sampler(folder: Path, split: SplitSettings) -> Sampler:
    """The sampler of a split of a dataset folder; raises DataError and ConfigError as it does."""
    lengths = LengthTable.read(folder, split.name, split.sampler.family)
    tasks = read_task_ids(folder, split.name, len(lengths)) if split.sampler.needs_tasks else None
    try:
        return Sampler(
            lengths,
            split.sampler,
            tasks,
            SpanTable.read(folder / split.name),
            first_iteration=split.first_iteration,
            first_sample=split.first_sample,
        )
    except DataError as error:
        raise DataError(f"{split.name}: {error.message}", hint=error.hint) from None
