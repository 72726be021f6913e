"""Which ways to make micro-batches a run's settings allow, and what they propose for a batch."""

from typing import Any

import numpy as np
import pytest

from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.core.ways import best
from megatron_dynapipe.ways import ways_of
from megatron_dynapipe.ways.pieces import CutCandidate
from tests.core.planner_cases import of_lengths, planner, settings

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
BOTH = tuple(BatchLayout)
LENGTHS = [1600, 900, 400, 300, 200, 100]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        (GPT, {}, [["WholeSamples"]]),
        (GPT, {"slices": "auto"}, [["WholeSamples"]]),  # pieces run in packed rows
        (T5, {"slices": "auto", "micro_batch_layouts": BOTH}, [["WholeSamples"]]),
        (
            *(GPT, {"slices": "auto", "micro_batch_layouts": BOTH}),
            [["WholeSamples", "CutSamples"], ["CutSamples"]],
        ),
        (GPT, {"slices": 512, "micro_batch_layouts": BOTH}, [["CutSamples"], ["WholeSamples"]]),
        (GPT, {"data_parallel": 4, "replicas_in_step": 2}, [["InStep"]]),
    ],
)
def test_ways_follow_from_settings(family: ModelFamily, changes: dict[str, Any], expected: list[list[str]]) -> None:
    assert [[type(way).__name__ for way in ways] for ways in ways_of(settings(family, **changes))] == expected


def test_pieces_of_a_given_size_are_the_default_and_those_of_chosen_sizes_are_not() -> None:
    for slices, defaults in ((512, [True]), ("auto", [True, *[False] * 6])):  # four sizes, two in two ways
        made = planner(GPT, micro_batch_layouts=BOTH, slices=slices)
        samples = made.samples(of_lengths(LENGTHS))
        problem = made.problem(samples)
        proposed = [candidate for way in made.ways[0] for candidate in way.candidates(samples, problem)]
        assert [candidate.is_default for candidate in proposed] == defaults
        cuts = [candidate.pieces.end.tolist() for candidate in proposed if isinstance(candidate, CutCandidate)]
        assert len(cuts) == max(len(defaults) - 1, 1) and all(cuts.count(each) == 1 for each in cuts)


def test_the_best_candidate_is_as_fast_as_the_default_at_least() -> None:
    made = planner(GPT, micro_batch_layouts=BOTH, slices="auto", pipeline_parallel=4)
    samples = made.samples(of_lengths(LENGTHS))
    problem = made.problem(samples)
    proposed = [candidate for way in made.ways[0] for candidate in way.candidates(samples, problem)]
    chosen = ScheduleSettings(search_evaluations=0)
    found, whole = best(proposed, chosen), proposed[0].scheduled(chosen)
    assert found is not None and whole is not None
    assert found[1].makespan_ns <= whole.makespan_ns, "few rows: both are searched"
    held = np.concatenate(found[1].members)
    assert np.sort(held).tolist() == list(range(len(found[0].samples.ids)))
    assert best([], chosen) is None
