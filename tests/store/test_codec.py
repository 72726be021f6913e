import msgspec
import pytest

from megatron_dynapipe.core.errors import PlanDecodeError
from megatron_dynapipe.core.instructions import Backward, Forward
from megatron_dynapipe.core.plan import Event, IterationPlan, ReplicaPlan, StagePlan
from megatron_dynapipe.core.units import ModelFamily, Recompute, Shape
from megatron_dynapipe.store import codec
from megatron_dynapipe.store.entry import StageEntry
from tests.core.test_fuzz import signed
from tests.helpers.lists import micro_batch, parse_stages
from tests.helpers.plans import make_plan

STAGE_0 = (
    "stage 0: RECV_B0<1[16x2x4] LOAD0 F0 SEND_F0>1[16x2x4] FREE_DATA0 WAIT_RECV_B0<1 WAIT_SEND_F0>1 FREE_OUTPUT0 B0 "
    "FREE_OUTPUT_GRAD0"
)
STAGE_1 = (
    "stage 1: RECV_F0<0[16x2x4] LOAD0 WAIT_RECV_F0<0 F0 FREE_DATA0 B0 FREE_INPUT0 SEND_B0>0[16x2x4] WAIT_SEND_B0>0 "
    "FREE_INPUT_GRAD0"
)

# If one of these changes, stored plans would be misread: raise codec.VERSION (records), or give a new instruction a
# number never used before.
GOLDEN_PLAN = (
    "44594e41504c0007c55d8f622ff9f91c288e77fa48cf28109b07a3677074c2a4356537370201cd03e8920a0bc391a6706164"
    "6465649193919b920409920a1092000093021000a670616464656492a973656c656374697665a46e6f6e6592050692070890"
    "909201009293009a960602000001919310020492010093020000960401000001919310020494080100009507020000019505"
    "01000001940803000093030000940804000092939302000000cd012c9393030000cd0384cd05dc93019a9606010000009193"
    "1002049201009507010000009302000094080100009303000094080200009604020000009193100204950502000000940805"
    "0000929393020000cd0136cd01f49393030000cd01f4cd037acd05dc"
)


def golden_plan() -> IterationPlan:
    first, second = parse_stages(f"{STAGE_0}\n{STAGE_1}")
    modes = (Recompute.SELECTIVE, Recompute.NONE)
    costs = {"stored_bytes": (5, 6), "peak_bytes": (7, 8)}
    batch = micro_batch(Shape(2, 16), (10, 16), sample_ids=(4, 9), recompute=modes, **costs)
    stages = (
        StagePlan(stage=0, instructions=first, predicted=(Event(Forward(0), 0, 300), Event(Backward(0), 900, 1500))),
        StagePlan(stage=1, instructions=second, predicted=(Event(Forward(0), 310, 500), Event(Backward(0), 500, 890))),
    )
    return IterationPlan(
        iteration=7,
        family=ModelFamily.GPT,
        forward_only=False,
        settings_digest="5e77",
        pipeline_stages=2,
        chunks=1,
        memory_limit_bytes=1000,
        model_state_bytes=(10, 11),
        peak_covers_backward=True,
        replicas=(ReplicaPlan(micro_batches=(batch,), stages=stages, predicted_ns=1500),),
    )


def test_the_wire_format_does_not_change_unnoticed():
    plan = golden_plan()
    assert codec.encode(plan).hex() == GOLDEN_PLAN
    assert codec.decode_plan(bytes.fromhex(GOLDEN_PLAN)) == plan


@pytest.mark.parametrize("family", ModelFamily)
@pytest.mark.parametrize(("counts", "stages", "chunks"), [((3,), 2, 1), ((0, 2), 3, 1), ((4, 5), 2, 2), ((1,), 1, 1)])
def test_plans_and_entries_come_back_equal(family, counts, stages, chunks):
    plan = make_plan(counts, stages, chunks=chunks, family=family)
    assert codec.decode_plan(codec.encode(plan)) == plan
    entries = codec.encode_entries(plan)
    assert [(replica, stage) for replica, stage, _ in entries] == [
        (replica, stage) for replica in range(len(counts)) for stage in range(stages)
    ]
    for replica, stage, data in entries:
        entry = codec.decode_entry(data)
        assert entry.stage_plan == plan.replicas[replica].stages[stage]
        assert entry.plan_digest == codec.digest(plan)
        assert entry.totals == plan.totals
        assert entry.micro_batches == plan.replicas[replica].micro_batches
        assert data == codec.encode(StageEntry.of(plan, replica, stage, plan_digest=codec.digest(plan)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"abc", "expected at least 24 bytes of a plan, got 3"),
        (lambda data: b"PK\x03\x04" + bytes(60), r"expected a plan starting with b'DYNAPL', got b'PK"),
        (lambda data: data[:-1], "the plan is damaged: expected digest"),
        (lambda data: data + b"\0", "the plan is damaged: expected digest"),
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "the plan is damaged: expected digest"),
        (lambda data: codec.encode_entries(golden_plan())[0][2], "not a valid IterationPlan: "),
        (lambda data: signed(data[24:].replace(b"5e77", b"\xff\xfe\xfd\xfc")), "not a valid IterationPlan"),
    ],
    ids=["short", "another format", "cut", "longer", "a bit", "an entry", "no text"],
)
def test_damage_is_refused_and_named(change, message):
    with pytest.raises(PlanDecodeError, match=message):
        codec.decode_plan(change(codec.encode(golden_plan())))


def changed(*place, to):
    """The golden plan's fields with the one at this place set to another value."""
    fields = part = msgspec.to_builtins(golden_plan())
    for position in place[:-1]:
        part = part[position]
    part[place[-1]] = to
    return fields


FIELDS = msgspec.to_builtins(golden_plan())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed(0, to="seven"), r"Expected `int`, got `str` - at `\$\[0\]`"),
        (changed(1, to="bert"), r"Invalid enum value 'bert' - at `\$\[1\]`"),
        (changed(2, to=None), r"Expected `bool`, got `None` - at `\$\[2\]`"),
        (FIELDS[:-2], "Expected `array` of at least length 11, got 10"),  # the last one says who runs in step
        ([*FIELDS, 0], "Expected `array` of at most length 12, got 13"),
        (changed(-2, 0, 1, 0, 1, 0, 0, to=99), "Invalid value 99"),  # the opcode of stage 0's first instruction
        (changed(-2, 0, 0, 0, 0, to=[0]), ".*got 1 sample ids"),  # for two samples
    ],
)
def test_a_field_of_the_wrong_form_is_named(fields, message):
    with pytest.raises(PlanDecodeError, match=f"not a valid IterationPlan: {message}"):
        codec.decode_plan(signed(msgspec.msgpack.encode(fields)))
