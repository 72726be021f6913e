"""Plans of a dataset: the same whenever they are asked for, and wherever a start begins."""

import msgspec

from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.service.planned_splits import FOLLOWED, PlannedSplits


def of_rows(job, **changes: object):
    """The job's inputs, planned in packed rows; its training begins where `changes` say."""
    planner = msgspec.structs.replace(job.inputs.planner, micro_batch_layouts=(BatchLayout.PACKED,))
    train, *others = job.inputs.splits
    splits = (msgspec.structs.replace(train, **changes), *others)
    return msgspec.structs.replace(job.inputs, planner=planner, splits=splits)


def test_later_plans_follow_the_first_ones_wherever_a_start_begins(settings, monkeypatch) -> None:
    job = settings()
    whole = PlannedSplits(of_rows(job))
    plans = [whole.entries("train", iteration) for iteration in range(FOLLOWED + 3)]
    resumed = PlannedSplits(of_rows(job, first_iteration=4, first_sample=4 * 12))
    for iteration in (5, 4):
        assert resumed.entries("train", iteration) == plans[iteration]
    assert [PlannedSplits(of_rows(job)).entries("train", at) == plans[at] for at in (4, 0)] == [True, True]
    asked: list[int] = []
    monkeypatch.setattr(
        "megatron_dynapipe.service.planned_splits.precedents_of", lambda _, batches: asked.append(len(batches)) or ()
    )
    alone = PlannedSplits(of_rows(job))
    searched = [alone.entries("train", iteration) for iteration in range(FOLLOWED + 3)]
    assert asked == [FOLLOWED], "once"
    assert searched[:FOLLOWED] == plans[:FOLLOWED] and searched[FOLLOWED:] != plans[FOLLOWED:]
