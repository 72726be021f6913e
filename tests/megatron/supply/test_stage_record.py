"""One stage's record of an iteration: losses, times and memory."""

import pytest
import torch

from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.memory import high_water_marks
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.supply.stage_record import Between, HostLosses, stage_record
from megatron_dynapipe.runtime.memory import MemoryCounts
from megatron_dynapipe.store.entry import StageEntry, activation_peak_bytes
from tests.helpers.plans import make_plan

PLAN = make_plan((3,), 2)


def item(stage: int, waited_seconds: float = 0.0) -> PlannedIteration:
    entry = StageEntry.of(PLAN, 0, stage, plan_digest="d")
    return PlannedIteration(entry=entry, micro_batches=(), waited_seconds=waited_seconds)


def test_losses_are_summed_over_micro_batches():
    losses = [{"lm loss": torch.tensor([2.0, 4.0])}, {"lm loss": torch.tensor([1.0, 6.0]), "odd": torch.ones(())}]
    record = stage_record(item(1), PLAN.replicas[0].stages[1].predicted, HostLosses(losses).read(), None, previous=None)
    assert record.losses == {"lm loss": (3.0, 10.0)}


def test_times_and_memory():
    given = item(1, waited_seconds=3e-9)
    events = given.entry.stage_plan.predicted
    counts = MemoryCounts(allocated_bytes=5, reserved_bytes=7, retries=0)
    start = events[0].start_ns
    before = Between(list_ns=start - 20, reduced_ns=start - 16, stepped_ns=start - 9)
    record = stage_record(given, events, {}, counts, previous=before)
    assert (record.plan_wait_ns, record.between_ns, record.reduction_ns, record.optimizer_ns) == (3, 17, 4, 7)
    assert record.forward_ns + record.backward_ns == sum(event.end_ns - event.start_ns for event in events)
    assert (record.allocated_bytes, record.reserved_bytes) == (5, 7)
    assert stage_record(given, (), {}, None, previous=before).between_ns == 0


@pytest.mark.parametrize("chunks", [1, 2])
def test_planned_activations_are_the_plans_peak_without_model_state_and_messages(chunks):
    plan = make_plan((4,), 2, chunks=chunks)
    for stage in range(2):
        entry = StageEntry.of(plan, 0, stage, plan_digest="d")
        passes = [step for step, each in enumerate(entry.stage_plan.instructions) if isinstance(each, Pass)]
        marks = high_water_marks(plan, plan.replicas[0], stage, passes, [0] * len(passes))
        assert activation_peak_bytes(entry) == max(marks) - 10  # `make_plan`'s state
