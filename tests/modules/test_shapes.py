"""Learning shapes at a boundary: whatever each stage has forgotten, all stages learn it together."""

import itertools
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.modules import shapes
from megatron_dynapipe.modules.shapes import ShapeTracker, Structure

STAGES, KEYS = 3, ("a", "b")
DEADLINE_S = 20


class Control:
    """A control group of threads: a wait that is never answered fails after a deadline."""

    def __init__(self, rank: int, job: "Job") -> None:
        self._rank, self._job = rank, job

    def gather_texts(self, text: str) -> list[str]:
        self._job.texts[self._rank] = text
        self._job.barrier.wait(DEADLINE_S)
        texts = [self._job.texts[rank] for rank in range(STAGES)]
        self._job.barrier.wait(DEADLINE_S)  # nobody writes the next text before all have read this one
        return texts


class Job:
    """What the stages of one pipeline share."""

    def __init__(self) -> None:
        self.barrier, self.texts = threading.Barrier(STAGES), {}
        self.trackers = [
            ShapeTracker(SimpleNamespace(stage=s, stages=STAGES, pipeline=range(STAGES), control=Control(s, self)))
            for s in range(STAGES)
        ]

    def learn(self, failing: tuple[int, str] | None = None, keys: Sequence[str] = KEYS) -> list[str]:
        """One step with these shapes on every stage; what each of them raised."""
        said = [""] * STAGES

        def stage(rank: int) -> None:
            try:
                self.trackers[rank].learn({key: lambda r, key=key: self.run(rank, key, r, failing) for key in keys})
            except (ConfigError, threading.BrokenBarrierError) as error:
                said[rank] = repr(error)

        threads = [threading.Thread(target=stage, args=(rank,)) for rank in range(STAGES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    @staticmethod
    def run(stage: int, key: str, received: Structure | None, failing: tuple[int, str] | None) -> Structure | None:
        if (stage, key) == failing:
            raise RuntimeError("boom")
        assert (received is None) == (stage == 0)
        assert stage == 0 or received == meta(stage - 1, key)
        return None if stage == STAGES - 1 else meta(stage, key)


def meta(stage: int, key: str) -> Structure:
    return Structure.of(torch.empty(stage, ord(key), device="meta", requires_grad=True))


PLACES = list(itertools.product(range(STAGES), KEYS))
SUBSETS = [set(some) for count in range(len(PLACES) + 1) for some in itertools.combinations(PLACES, count)]


@pytest.mark.parametrize("failing", [None, (0, "a"), (1, "a"), (2, "b")], ids=str)
def test_whatever_any_stage_has_forgotten_all_learn(failing):
    """All 64 states of two shapes on three stages, with and without a stage that fails."""
    for forgotten in SUBSETS:
        job = Job()
        assert job.learn() == [""] * STAGES
        for stage, key in forgotten:
            del job.trackers[stage]._known[key]
        before = [tracker.learned for tracker in job.trackers]
        said = job.learn(failing)
        fails = failing is not None
        for stage, (tracker, count) in enumerate(zip(job.trackers, before, strict=True)):
            new = {key for place, key in forgotten if place == stage and not (fails and key == failing[1])}
            assert tracker.learned - count == len(new)
        if fails:
            assert all("boom" in text for text in said)
            assert job.learn() == [""] * STAGES, "the next step works"
        else:
            assert said == [""] * STAGES
        for stage, key in PLACES:
            received, sent = job.trackers[stage].known(key)
            assert received == (meta(stage - 1, key) if stage else None)
            assert sent == (meta(stage, key) if stage < STAGES - 1 else None)
        before = [tracker.learned for tracker in job.trackers]
        assert job.learn() == [""] * STAGES and before == [tracker.learned for tracker in job.trackers]


def test_the_oldest_shapes_are_forgotten_but_none_of_the_step(monkeypatch):
    monkeypatch.setattr(shapes, "_MOST_SHAPES", 2)
    job = Job()
    for keys in ("ab", "ca", "dab"):  # "a" is the oldest when "c" comes
        assert job.learn(keys=keys) == [""] * STAGES
        assert all(job.trackers[stage].knows(key) for stage in range(STAGES) for key in keys)
    assert not any(tracker.knows("c") for tracker in job.trackers)
