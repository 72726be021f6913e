"""Messages are planned memory: what a list holds of them, and plans that leave them room."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dynapipe.errors import InfeasibleError, PlanMemoryError
from megatron_dynapipe.plan.codec import digest
from megatron_dynapipe.plan.instructions import BackwardInput
from megatron_dynapipe.plan.memory import message_elements, peak_bytes
from megatron_dynapipe.plan.text import parse_instruction
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning import message_room
from megatron_dynapipe.planning import planner as planner_module
from megatron_dynapipe.planning.message_room import leave_room_for_messages
from megatron_dynapipe.planning.native import fast_verify
from megatron_dynapipe.planning.samples import fits_alone, may_fit
from megatron_dynapipe.units import BatchLayout, ModelFamily, Recompute
from tests.planning.planner_cases import batch, batch_of, planner

MIDDLE = """
LOAD0 RECV_F0<0[2] WAIT_RECV_F0<0 RECV_F1<0[3] F0 SEND_F0>2[5] FREE_DATA0
LOAD1 WAIT_RECV_F1<0 F1 SEND_F1>2[7] FREE_DATA1 RECV_B0<2[5]
WAIT_RECV_B0<2 WAIT_SEND_F0>2 FREE_OUTPUT0 RECV_B1<2[7] B0 SEND_B0>0[2] FREE_INPUT0 FREE_OUTPUT_GRAD0
WAIT_RECV_B1<2 WAIT_SEND_F1>2 FREE_OUTPUT1 B1
"""


def test_messages_of_a_list() -> None:
    """Two inputs at once of at most 3, two gradients of at most 7: buffers of 20, kept inputs counted with passes."""
    lists = [parse_instruction(word) for word in MIDDLE.split()]
    assert message_elements(lists, forward_only=False) == [20, 20 + 5 - 2, 20 + 7 - 3, 20 + 2]


@pytest.mark.parametrize("family", ModelFamily)
@pytest.mark.parametrize("forward_only", [False, True])
def test_plans_leave_messages_room(family: ModelFamily, forward_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched plans fill all memory: without a rule for messages, they exceed it by them."""
    limit = {"memory_limit_bytes": 24_000_000, "pipeline_parallel": 4, "element_bytes": 4}
    found = planner(family, **limit).plan(batch(family, 60), 0, forward_only=forward_only)
    verify(found, element_bytes=4, fast_verify=fast_verify)
    peaks = [peak_bytes(found, found.replicas[0], stage, 4) for stage in range(4)]
    assert max(peaks) <= found.memory_limit_bytes
    with pytest.raises(PlanMemoryError, match=r"stage \d: expected at most 24.* MB, got"):
        verify(found, element_bytes=400)
    monkeypatch.setattr(planner_module, "verify", lambda plan, **_: None)
    blind = planner(family, **limit).plan(batch(family, 60), 0, forward_only=forward_only)
    assert max(peak_bytes(blind, blind.replicas[0], stage, 4) for stage in range(4)) > blind.memory_limit_bytes


def test_plans_with_room_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planner(ModelFamily.T5).plan(batch(ModelFamily.T5, 40), 0)
    monkeypatch.setattr(planner_module, "verify", lambda plan, **_: None)
    assert digest(found) == digest(planner(ModelFamily.T5).plan(batch(ModelFamily.T5, 40), 0))


def test_room_is_sought_between_too_little_and_too_much() -> None:
    """Messages take 40 beside passes that are given all memory; leaving so much fits no schedule, leaving 20 does."""
    tried: list[tuple[int, int | None]] = []

    def planned(reserved, last, searched):
        assert searched
        tried.append((int(reserved[0]), last))
        if reserved[0] > 30:
            raise InfeasibleError("no schedule fits")
        return int(reserved[0])

    def verified(leaves):
        if leaves < 20:
            raise PlanMemoryError("over", (40,))
        return leaves

    assert leave_room_for_messages(planned, verified, 1) == 20 and tried == [(0, None), (40, 0), (20, 0)]
    with pytest.raises(InfeasibleError, match="passes fit, but not beside their messages: over"):
        leave_room_for_messages(lambda *_: 0, verified, 1)


def test_the_order_of_1f1b_leaves_room_where_searched_ones_do_not() -> None:
    tried: list[tuple[int, int | None, bool]] = []

    def planned(reserved, last, searched):
        tried.append((int(reserved[0]), last, searched))
        return 0 if searched else int(reserved[0]) + 1

    def verified(leaves):
        if leaves < 40:
            raise PlanMemoryError("over", (39,))
        return leaves

    assert leave_room_for_messages(planned, verified, 1) == 40
    assert tried[-3:] == [(39, 0, True), (0, None, False), (39, 1, False)]


@pytest.mark.parametrize("division", ["auto", "on"])
def test_a_plan_in_the_order_of_1f1b_is_one_of_the_run(division: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the digest of the run's settings, under which ranks look for it."""
    monkeypatch.setattr(message_room, "SEARCHED_ATTEMPTS", 0)
    made = planner(ModelFamily.GPT, pipeline_parallel=4, split_backward=division)
    found = made.plan(batch(ModelFamily.GPT, 40), 0)
    passes = {type(each) for stage in found.replicas[0].stages for each in stage.instructions}
    assert found.settings_digest == made.digest and BackwardInput not in passes


def test_a_plan_without_room_is_searched_on_and_not_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search in less memory begins with the micro-batches of the one in all memory, which are hardly changed."""
    begun = []
    schedule = planner_module.schedule_batch

    def recorded(problem, partitioned, *args, **kwargs):
        begun.append(len(partitioned.chosen))
        return schedule(problem, partitioned, *args, **kwargs)

    monkeypatch.setattr(planner_module, "schedule_batch", recorded)
    limit = {"memory_limit_bytes": 24_000_000, "pipeline_parallel": 4, "element_bytes": 4}
    planner(ModelFamily.GPT, **limit).plan(batch(ModelFamily.GPT, 60), 0)
    assert begun[0] == 0 and begun[1:] and set(begun[1:]) == {1}


def test_a_row_may_fit_where_a_padded_micro_batch_does_not() -> None:
    """Padded positions are multiples of 8, a row's those of its samples: no search is given up for either alone."""
    made = planner(
        ModelFamily.GPT,
        pipeline_parallel=4,
        micro_batch_layouts=tuple(BatchLayout),
        slices="off",
        recompute=(Recompute.NONE,),
    )
    samples = made.samples(batch_of((130, 0)))
    problem = made.problem(samples)
    needed = [
        int((made.model_state_bytes + costs.bytes_alone.min(axis=0)).max())
        for costs, _ in (problem.costs_of([np.arange(1)], [layout], np.zeros(1, np.int64)) for layout in BatchLayout)
    ]
    assert needed[1] < needed[0]
    for limit, fits in ((needed[1] - 1, False), (needed[1], True), (needed[0], True)):
        at_limit = replace(problem, memory_limit_bytes=limit)
        assert may_fit(at_limit) == fits and fits_alone(at_limit).all() == (limit == needed[0])
