"""Replicas that run in step: fillers, groups, samples cut alike, and what the verifier says where they are not."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.orders import SCHEDULES, ScheduleSettings
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store import codec
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import planner

GPT = ModelFamily.GPT


def planned(lengths: list[int], *, ids: list[int] | None = None, **changes: object) -> IterationPlan:
    settings = {"data_parallel": 2, "replicas_in_step": 2, "micro_batch_layouts": tuple(BatchLayout)} | changes
    tokens = np.array(lengths, np.int32)
    sample_ids = np.arange(len(tokens)) if ids is None else np.array(ids)
    batch = GlobalBatch(iteration=0, sample_ids=sample_ids, input_lengths=tokens, target_lengths=0 * tokens)
    return planner(GPT, **settings).plan(batch, 0)


def counts(plan: IterationPlan) -> list[int]:
    return [len(replica.micro_batches) for replica in plan.replicas]


@pytest.mark.parametrize("lengths", [[1000, 900, 800], [1500], [700, 600, 300, 200, 20, 10, 9]])
def test_a_replica_without_a_sample_at_a_position_gets_a_filler(lengths: list[int]) -> None:
    plan = planned(lengths, slices="off", memory_limit_bytes=73 * 10**6, recompute=(Recompute.FULL,))
    verify(plan, expected_samples=range(len(lengths)))
    assert codec.decode_plan(codec.encode(plan)) == plan
    fillers = [each for replica in plan.replicas for each in replica.micro_batches if each.is_filler]
    assert len(set(counts(plan))) == 1 and all(each.shape.positions == 8 for each in fillers)
    assert fillers or len(lengths) == 7


def test_groups_of_replicas_are_free_of_each_other() -> None:
    lengths = [int(n) for n in np.random.default_rng(3).lognormal(5, 1, 41).clip(8, 1500)]
    plan = planned(lengths, data_parallel=4, memory_limit_bytes=10**8)
    first, second = counts(plan)[::2]
    assert counts(plan) == [first, first, second, second] and plan.in_step == 2
    together = planned(lengths, data_parallel=4, memory_limit_bytes=10**8, replicas_in_step=4)
    assert len(set(counts(together))) == 1 and together.in_step == 4


@pytest.mark.parametrize("method", SCHEDULES)
def test_replicas_run_in_step_under_every_schedule(method: str) -> None:
    lengths = [700, 600, 300, 200, 20, 10, 9]
    plan = planned(lengths, schedule=ScheduleSettings(method=method))
    verify(plan, expected_samples=range(len(lengths)))


def test_samples_of_a_row_are_cut_at_the_same_positions() -> None:
    lengths = [1601, 1409, 1001, 961, 101, 81, 61]
    plan = planned(lengths, slices=400, micro_batch_layouts=(BatchLayout.PACKED,))
    verify(plan, expected_samples=range(len(lengths)))
    starts = [
        {piece.start for each in replica.micro_batches for piece in each.pieces if piece.start}
        for replica in plan.replicas
    ]
    assert starts[0] and (starts[0] <= starts[1] or starts[1] <= starts[0])


def test_a_sample_that_a_batch_holds_twice_stays_whole() -> None:
    lengths, cut = [1601, 1601, 1409, 101], {"slices": 400, "micro_batch_layouts": (BatchLayout.PACKED,)}
    assert planned(lengths, ids=[5, 6, 5, 5], **cut).totals.samples == 4


def changed(plan: IterationPlan, replica: int, **changes: object) -> IterationPlan:
    share = plan.replicas[replica]
    micro_batches = list(share.micro_batches)
    micro_batches[-1] = msgspec.structs.replace(micro_batches[-1], **changes)
    shares = list(plan.replicas)
    shares[replica] = msgspec.structs.replace(share, micro_batches=tuple(micro_batches))
    return msgspec.structs.replace(plan, replicas=tuple(shares))


def test_the_verifier_names_the_first_position_that_differs() -> None:
    plan = planned([1500, 1400, 700, 600, 30], memory_limit_bytes=73 * 10**6, recompute=(Recompute.FULL,))
    last = counts(plan)[0] - 1
    with pytest.raises(PlanError, match=rf"replicas 0 and 1 run in step: .* one kind at position {last}, got .*none"):
        verify(changed(plan, 1, recompute=(Recompute.NONE,) * 2))
    longer = planned([1500, 1400, 700, 600, 30, 1300, 1200], memory_limit_bytes=73 * 10**6, recompute=(Recompute.FULL,))
    mixed = msgspec.structs.replace(plan, replicas=(plan.replicas[0], longer.replicas[1]))
    with pytest.raises(PlanError, match="replicas 0 and 1 run in step: expected micro-batches of one kind at position"):
        verify(mixed)
    alone = msgspec.structs.replace(planned([1000, 900, 800], memory_limit_bytes=73 * 10**6), in_step=1)
    with pytest.raises(PlanError, match="expected samples, got none"):
        verify(alone)
    with pytest.raises(PlanError, match="expected groups of replicas in step that divide 2, got 3"):
        verify(msgspec.structs.replace(plan, in_step=3))


def test_the_verifier_names_the_first_pass_that_differs() -> None:
    plan = planned([1500, 1400, 1300, 1200, 1100, 1000], memory_limit_bytes=73 * 10**6, recompute=(Recompute.FULL,))
    share = plan.replicas[1]
    stage = share.stages[0]
    swapped = [*stage.instructions]
    places = [at for at, each in enumerate(swapped) if type(each).__name__ == "Forward"]
    swapped[places[0]], swapped[places[1]] = swapped[places[1]], swapped[places[0]]
    stages = (msgspec.structs.replace(stage, instructions=tuple(swapped)), *share.stages[1:])
    shares = (plan.replicas[0], msgspec.structs.replace(share, stages=stages))
    with pytest.raises(PlanError, match="one order of passes on stage 0, got F0 and F1 as pass 0"):
        verify(msgspec.structs.replace(plan, replicas=shares))
