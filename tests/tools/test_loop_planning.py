"""Plans of a replica for samples that it was given."""

import itertools

import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanError, PlanningError
from megatron_dynapipe.core.instructions import Backward, Forward, RecvStart, SendStart
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, ModelShape, model_of_layers
from megatron_dynapipe.tools.loop_planning import check_order, plain_rows, stage_entry

LENGTHS = ([900, 30, 45, 500, 12, 77, 640, 20], [33, 410, 5, 81, 260, 700, 9, 120])


def planner(**settings):
    chosen = {
        "pipeline_parallel": 2,
        "memory_limit_bytes": 12_000_000,
        "micro_batch_layouts": (BatchLayout.PACKED,),
    } | settings
    shape = ModelShape(family=ModelFamily.GPT, hidden=64, heads=4, kv_channels=16, ffn=256, vocabulary=100)
    sized = PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, 8),
        hidden_size=64,
        **chosen,
    )
    return planner_of(sized, AnalyticCostModel(shape, A100_RATES, max_size=64, max_length=4096))


def entry_of(by, own, others=(), *, stage=0, forward_only=False, rows=None):
    rows = rows or plain_rows(by.settings)
    return stage_entry(by, own, others, iteration=0, stage=stage, forward_only=forward_only, wire_rows=rows)


def samples(entry):
    return [micro_batch.sample_ids for micro_batch in entry.micro_batches]


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_replica_plans_its_own_samples(forward_only):
    found = [samples(entry_of(planner(), own, forward_only=forward_only)) for own in LENGTHS]
    assert all(sorted(itertools.chain(*each)) == list(range(8)) for each in found)
    assert len({len(each) for each in found}) == 2


def test_replicas_in_step_run_one_plan_with_samples_of_their_own():
    entries = [entry_of(planner(), own, LENGTHS) for own in LENGTHS]
    one, other = map(samples, entries)
    assert [len(each) for each in one] == [len(each) for each in other] and len(one) > 1
    assert sorted(itertools.chain(*one)) == sorted(itertools.chain(*other)) == list(range(8))
    assert entries[0].plan_digest == entries[1].plan_digest
    by_length = [sorted(range(8), key=lambda place: -own[place]) for own in LENGTHS]
    assert [by_length[0].index(place) for place in one[0]] == [by_length[1].index(place) for place in other[0]]
    with pytest.raises(PlanningError, match=r"as many samples on every replica, got \[7, 8\]"):
        entry_of(planner(), LENGTHS[0], (LENGTHS[0], LENGTHS[1][1:]))


def test_messages_have_the_rows_that_the_loop_makes():
    def padded(lengths):
        return sum(-(-length // 64) * 64 for length in lengths)

    ends = [entry_of(planner(), LENGTHS[0], stage=stage, rows=padded) for stage in (0, 1)]
    for entry in ends:
        rows = [padded([LENGTHS[0][place] for place in each]) for each in samples(entry)]
        sent = [step for step in entry.stage_plan.instructions if isinstance(step, SendStart | RecvStart)]
        assert len(sent) == 2 * len(rows)
        assert all(step.shapes == ((rows[step.micro_batch], 1, 64),) for step in sent)


def test_rows_that_nothing_pads():
    whole, shared = (planner(tensor_parallel=2, sequence_parallel=shares).settings for shares in (False, True))
    assert plain_rows(whole)([5, 3, 1]) == (9, 1) and plain_rows(shared)([5, 3, 1]) == (5, 1)
    padded = planner(micro_batch_layouts=(BatchLayout.PADDED,)).settings
    assert plain_rows(padded)([5, 3, 1]) == (5, 3)


@pytest.mark.parametrize("schedule", ["adaptive", "1f1b"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("rules", [GLOO_RULES, CUDA_RULES], ids=["gloo", "cuda"])
def test_passes_of_every_schedule_run_in_the_order_of_micro_batches(schedule, chunks, rules):
    by = planner(
        chunks=chunks,
        schedule=ScheduleSettings(method=schedule, search_evaluations=200),
        transfers=rules,
        memory_limit_bytes=60_000_000,
    )
    for forward_only, stage in itertools.product((False, True), (0, 1)):
        assert len(samples(entry_of(by, LENGTHS[0] * 4, stage=stage, forward_only=forward_only))) > 1


def test_passes_in_another_order_are_refused():
    check_order([Forward(0, 1), Forward(0, 0), Forward(1, 1), Backward(0, 1)])
    with pytest.raises(
        PlanError, match=r"in the order of micro-batches, got Backward\(micro_batch=0.* of 1\nhint: use"
    ):
        check_order([Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)])
