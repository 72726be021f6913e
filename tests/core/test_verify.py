import msgspec
import pytest

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Backward, Forward, format_stages
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.plan import Event, IterationPlan
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute, Shape
from megatron_dynapipe.ways.rules import verify
from tests.helpers.lists import parse_stages, verify_lists
from tests.helpers.plans import make_plan

replace = msgspec.structs.replace
GPT, T5 = ModelFamily

STAGE_0 = "RECV_B0<1[8x2x4] LOAD0 F0 SEND_F0>1[8x2x4] FREE_DATA0 WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 "
STAGE_0 += "FREE_OUTPUT_GRAD0"
STAGE_1 = "RECV_F0<0[8x2x4] LOAD0 WAIT_RECV_F0<0 F0 FREE_DATA0 B0 FREE_INPUT0 SEND_B0>0[8x2x4] WAIT_SEND_B0>0 "
STAGE_1 += "FREE_INPUT_GRAD0"


def check(first: str, second: str, **settings) -> None:
    verify_lists(parse_stages(f"stage 0: {first}\nstage 1: {second}"), micro_batches=1, **settings)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("LOAD0", "LOAD0 LOAD0", "DATA is READY, expected ABSENT"),
        ("LOAD0 ", "", "DATA is ABSENT, expected READY"),
        ("LOAD0", "LOAD1", "there are 1 micro-batches"),
        ("F0 SEND", "F0 F0 SEND", "the forward pass runs twice"),
        ("F0 SEND", "F0.1 SEND", "the stage has 1 chunks"),
        ("SEND_F0>1[8x2x4] ", "", "OUTPUT is READY, expected MOVING"),
        ("B0 FREE_OUTPUT_GRAD0", "FREE_OUTPUT_GRAD0 B0", "OUTPUT_GRAD is READY, expected USED"),
        ("B0 FREE_OUTPUT_GRAD0", "B0 B0 FREE_OUTPUT_GRAD0", "the backward pass runs twice"),
        ("LOAD0 F0", "LOAD0 B0 F0", "the backward pass runs before the forward"),
        ("WAIT_RECV_B0<1 ", "", "OUTPUT_GRAD is MOVING, expected READY"),
        ("WAIT_SEND_F0>1 ", "", "OUTPUT is MOVING, expected USED"),
        ("SEND_F0>1", "SEND_F0>0", "expected stage 1 as peer"),
        ("RECV_B0<1[8x2x4]", "RECV_B0<1[8x2x4] RECV_B0<1[8x2x4]", "has a receive already that has not been waited for"),
        ("FREE_DATA0", "FREE_DATA0 FREE_DATA0", "DATA is FREED, expected USED"),
        (" FREE_OUTPUT_GRAD0", "", "the list ends with OUTPUT_GRAD of micro-batch 0, chunk 0 USED, expected FREED"),
        (" FREE_DATA0", "", "the list ends with DATA of micro-batch 0, chunk 0 USED, expected FREED"),
        ("FREE_DATA0", "FREE_DATA0.1", "the stage has 1 chunks"),
        (" B0 FREE_OUTPUT_GRAD0", "", "the list ends without B0"),
    ],
)
def test_what_is_wrong_with_one_list_is_said(old, new, message):
    check(STAGE_0, STAGE_1)
    assert old in STAGE_0
    with pytest.raises(PlanError, match=f"stage 0.*{message}"):
        check(STAGE_0.replace(old, new, 1), STAGE_1)


def test_the_step_and_its_instruction_are_pointed_at():
    with pytest.raises(PlanError) as caught:
        check(STAGE_0.replace("F0 SEND", "F0 F0 SEND"), STAGE_1)
    assert caught.value.message == (
        "stage 0, step 3: the forward pass runs twice, at RECV_B0<1[8x2x4] LOAD0 F0 --> F0 <-- SEND_F0>1[8x2x4] "
        "FREE_DATA0 WAIT_RECV_B0<1 WAIT_SEND_F0>1 …"
    )


def test_a_forward_only_plan_has_no_backward():
    with pytest.raises(PlanError, match="a forward-only plan has no backward passes"):
        verify_lists(parse_stages("stage 0: LOAD0 F0 FREE_DATA0 B0"), micro_batches=1, forward_only=True)


def test_transfers_pair_up_in_shape():
    message = r"transfer 0 of activations from stage 0 to 1: sent is .*SEND_F0>1\[8x2x4\].*received is .*\[8x2x5\]"
    with pytest.raises(PlanError, match=message):
        check(STAGE_0, STAGE_1.replace("RECV_F0<0[8x2x4]", "RECV_F0<0[8x2x5]"))


def test_a_stall_is_shown_as_a_cycle():
    # Stage 0 turns micro-batch 0 round before it begins 1; stage 1 wants 1 before it turns 0 round.
    topology = PipelineTopology(stages=2, chunks=1, shapes=((((8, 2, 4),),),) * 2)
    one_by_one = (Forward(0), Backward(0), Forward(1), Backward(1))
    together = (Forward(0), Forward(1), Backward(0), Backward(1))
    lists = (lower((one_by_one,) * 2, topology)[0], lower((together,) * 2, topology)[1])
    with pytest.raises(PlanError) as caught:
        verify_lists(lists, micro_batches=2)
    assert caught.value.message == (
        "the plan stalls: stage 0 at … SEND_F0>1[8x2x4] FREE_DATA0 --> WAIT_RECV_B0<1 <-- RECV_B1<1[8x2x4] WA"
        "IT_SEND_F0>1 … waits for stage 1 to reach … --> SEND_B0>0[8x2x4] <-- … (step 12); stage 1 at … FREE_"
        "DATA0 LOAD1 --> WAIT_RECV_F1<0 <-- F1 FREE_DATA1 … waits for stage 0 to reach … --> SEND_F1>1[8x2x4]"
        " <-- … (step 13)"
    )


def plan_with(plan: IterationPlan, **changes) -> IterationPlan:
    """The plan with changes to its first replica's first micro-batch."""
    replica = plan.replicas[0]
    batch = replace(replica.micro_batches[0], **changes)
    return replace(plan, replicas=(replace(replica, micro_batches=(batch, *replica.micro_batches[1:])),))


ONE_STAGE = {"recompute": (Recompute.NONE,), "stored_bytes": (1,), "peak_bytes": (1,)}
HOLDS, SIZES = "does not hold its samples", "stored and peak bytes of 0 or more, got"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (GPT, {"input_lengths": (10, 18)}, f"replica 0, micro-batch 0: shape 2x16 {HOLDS}, which need 17"),
        (GPT, {"target_lengths": (0, 1)}, "expected target lengths of 0 for a gpt model"),
        (GPT, {"shape": Shape(2, 16, 8)}, "shape 2x16[+]8 is not of a gpt model"),
        (GPT, ONE_STAGE, "recompute modes, stored and peak bytes for 2 virtual stages, got 1"),
        (GPT, {"shape": Shape(2, 24)}, "stage 0, step .: the activations of a micro-batch of shape 2x24 cannot be"),
        (GPT, {"peak_bytes": (10**9, 99)}, r"stage 0: expected at most 1000\.0+ MB, got 1000\.0+1 MB at .*--> F0 <--"),
        (GPT, {"sample_ids": (-1, 3)}, "replica 0, micro-batch 0: expected sample ids of 0 or more, got -1"),
        (GPT, {"input_lengths": (0, 16)}, "expected lengths of 1 token or more, got 0"),
        (GPT, {"input_lengths": (-5, 16)}, "expected lengths of 1 token or more, got -5"),
        (GPT, {"stored_bytes": (-1, 4)}, f"{SIZES} -1"),
        (GPT, {"stored_bytes": (1, 1), "peak_bytes": (3, -4)}, f"{SIZES} -4"),
        (GPT, {"shape": Shape(2, 0)}, f"shape 2x0 {HOLDS}"),
        (GPT, {"shape": Shape(2, 16, -8)}, "expected a shape of 1 or more"),
        (GPT, {"stored_bytes": (10**12,) * 2, "peak_bytes": (5, 5)}, "peak to hold what it stores, got 5 bytes"),
        (GPT, {"labels": (9, 16)}, "micro-batch 0: expected 0 to 15 labels of 15 gpt positions, got 16"),
        (GPT, {"labels": (9, -1)}, "expected 0 to 15 labels of 15 gpt positions, got -1"),
        (GPT, {"labels": (9, 15)}, "expected labels in every micro-batch or in none, got some without"),
        (T5, {"labels": (0, 1)}, "expected 0 to 0 labels of 16 t5 positions, got 1"),
        (T5, {"target_lengths": (3, 7)}, f"{HOLDS}, which need 16 input and 9 target"),
        (T5, {"target_lengths": (3, 0)}, "expected lengths of 1 token or more, got 0"),
    ],
)
def test_micro_batches_fit(family, changes, message):
    with pytest.raises(PlanError, match=message):
        verify(plan_with(make_plan((3,), 2, family=family), **changes))


def test_a_backward_s_peak_counts_beside_what_others_keep_if_the_plan_says_so():
    """Under GPipe micro-batch 0 turns round while two others, of 6 and 9 bytes, are kept; it went forward alone."""
    plan = make_plan((3,), 1, method="gpipe")
    sizes = zip(plan.replicas[0].micro_batches, ((1, 100), (6, 6), (9, 9)), strict=True)
    batches = tuple(replace(batch, stored_bytes=(stored,), peak_bytes=(peak,)) for batch, (stored, peak) in sizes)
    plan = replace(plan, replicas=(replace(plan.replicas[0], micro_batches=batches),), memory_limit_bytes=10 + 100)
    verify(plan)
    with pytest.raises(PlanError, match=r"stage 0: expected at most 0\.00011 MB, got 0\.00013 MB at .*--> B0 <--"):
        verify(replace(plan, peak_covers_backward=True))
    verify(replace(plan, peak_covers_backward=True, memory_limit_bytes=10 + 100 + 6 + 9))


MIXED = (BatchLayout.PACKED, BatchLayout.PADDED)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (GPT, {"shape": Shape(1, 16)}, r"row of shape 1x24 or longer for samples that end at input position 24"),
        (GPT, {"shape": Shape(1, 28)}, r"expected a packed row of shape 1x24 .*, got 1x28"),
        (GPT, {"input_lengths": (10, 17)}, r"end at input position 25 and target position 0, got 1x24"),
        (T5, {"target_lengths": (3, 10)}, r"of shape 1x32[+]24 .* target position 17, got 1x32[+]16"),
    ],
)
def test_the_offsets_of_a_packed_row_cover_it(family, changes, message):
    verify(make_plan((3, 2), 2, family=family, layouts=MIXED))
    with pytest.raises(PlanError, match=f"replica 0, micro-batch 0: .*{message}"):
        verify(plan_with(make_plan((2,), 2, family=family, layouts=MIXED), **changes))


def test_packed_rows_where_the_settings_allow_them_of_their_samples_or_longer():
    plan = make_plan((2,), 1, layouts=MIXED)  # one stage: nothing crosses a boundary in the row's shape
    verify(plan_with(plan, shape=Shape(1, 64)))
    with pytest.raises(PlanError, match=r"micro-batch 0: .* layout .* allow \(padded\), got packed\nhint: plan"):
        verify(replace(plan, batch_layouts=(BatchLayout.PADDED,)))


def test_every_sample_is_planned_once():
    plan = make_plan((2, 1), 2)
    verify(plan, expected_samples=range(6))
    for samples, message in (
        (range(7), "expected the 7 samples of the global batch, got 6: lost 6; too many of none"),
        (range(5), "got 6: lost none; too many of 5"),
        ((0, *range(6)), "lost 0; too many of none"),
    ):
        with pytest.raises(PlanError, match=message):
            verify(plan, expected_samples=samples)


def test_stages_are_in_order():
    plan = make_plan((2,), 2)
    stages = plan.replicas[0].stages
    with pytest.raises(PlanError, match=r"replica 0: expected stages 0 to 1 in order, got \[1, 0\]"):
        verify(replace(plan, replicas=(replace(plan.replicas[0], stages=stages[::-1]),)))


def test_predictions_follow_the_list():
    plan = make_plan((2,), 2)
    replica = plan.replicas[0]

    def with_predicted(events):
        stages = (replace(replica.stages[0], predicted=tuple(events)), replica.stages[1])
        return replace(plan, replicas=(replace(replica, stages=stages),))

    events = replica.stages[0].predicted
    verify(with_predicted(()))
    with pytest.raises(PlanError, match="stage 0: the predicted timeline does not hold the list's passes"):
        verify(with_predicted(events[1:]))
    late = Event(events[-1].instruction, events[-1].start_ns, replica.predicted_ns + 1)
    with pytest.raises(PlanError, match="stage 0: expected predicted passes one after another within"):
        verify(with_predicted((*events[:-1], late)))


def test_gradients_have_their_activations_shapes():
    plan = make_plan((1,), 2)
    replica = plan.replicas[0]
    text = format_stages(stage.instructions for stage in replica.stages)
    text = text.replace("_B0<1[16x2x4]", "_B0<1[8x2x4]").replace("_B0>0[16x2x4]", "_B0>0[8x2x4]")
    stages = tuple(
        replace(stage, instructions=steps) for stage, steps in zip(replica.stages, parse_stages(text), strict=True)
    )
    with pytest.raises(PlanError, match=r"stage 1, step .: the gradients of a micro-batch of shape 2x16 cannot be"):
        verify(replace(plan, replicas=(replace(replica, stages=stages),)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": ()}, "expected at least one replica, got none"),
        ({"iteration": -1}, "expected an iteration of 0 or more, got -1"),
        ({"memory_limit_bytes": 0}, "expected a memory limit above 0, got 0 bytes"),
        ({"model_state_bytes": (-1, 10)}, "expected model state bytes of 0 or more, got -1"),
        ({"model_state_bytes": (1,)}, "expected model state bytes for 2 stages, got 1"),
        ({"pipeline_stages": 1, "chunks": 2}, "expected at least one stage, and several chunks only on several stages"),
    ],
)
def test_numbers_of_a_plan_that_cannot_be(changes, message):
    with pytest.raises(PlanError, match=message):
        verify(replace(make_plan((2,), 2), **changes))
