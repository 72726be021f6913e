import msgspec
import pytest

from megatron_dynapipe.plan.idle import idle_share
from megatron_dynapipe.plan.instructions import Backward, Forward
from megatron_dynapipe.plan.timeline import Event
from tests.helpers.plans import make_plan


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([[(0, 50), (50, 100)], [(0, 100)]], 0.0),
        ([[(0, 50), (50, 100)], [(0, 30), (80, 100)]], 0.25),
        ([[(0, 100)], []], 0.5),
    ],
)
def test_idle_share_of_two_stages(stages, expected):
    plan = make_plan((1,), 2)
    replica = plan.replicas[0]
    timed = tuple(
        msgspec.structs.replace(
            stage,
            predicted=tuple(Event(kind(0), *times) for kind, times in zip((Forward, Backward), events, strict=False)),
        )
        for stage, events in zip(replica.stages, stages, strict=True)
    )
    replica = msgspec.structs.replace(replica, stages=timed, predicted_ns=100)
    assert idle_share(msgspec.structs.replace(plan, replicas=(replica,))) == pytest.approx(expected)


def test_a_plan_without_micro_batches_is_not_idle():
    assert idle_share(make_plan((0,), 2)) == 0.0
