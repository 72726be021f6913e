"""Receives posted late and starts that wait: the same times and the same stalls in simulation, lists and proofs."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import PlanError, StallError
from megatron_dynapipe.core.instructions import Backward, Forward, RecvStart, RecvWait
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.native import fast_verify
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES, MANY_QUEUES_RULES, TransferRules, cuda_rules
from megatron_dynapipe.core.orders import SCHEDULES, Policy, Rule, list_schedule, one_f_one_b
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.core.verify_buffers import Dimensions
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.ways.rules import verify
from tests.core.planner_cases import batch, planner
from tests.core.transfer_oracle import ListsStallError, run_lists
from tests.helpers.lists import verify_lists
from tests.helpers.plans import divided, random_problem

RULES = [TransferRules(receive_ahead=a, ordered_starts=o) for a in (None, 0, 1, 3) for o in (False, True)]


def lists_of(problem, order, rules):
    rows = problem.micro_batches
    shapes = tuple(tuple(((1,),) for _ in range(problem.virtual_stages - 1)) for _ in range(rows))
    topology = PipelineTopology(
        stages=problem.stages,
        chunks=problem.chunks,
        shapes=shapes,
        forward_only=problem.forward_only,
        receive_ahead=rules.receive_ahead,
    )
    return lower(order, topology)


def ahead(problem, extra):
    """1F1B with more forwards in flight than fill the pipeline, on all stages but the last."""
    depths = [problem.stages - rank + (extra if rank + 1 < problem.stages else 0) for rank in range(problem.stages)]
    return one_f_one_b(problem, depths)


@st.composite
def orders(draw):
    stages, chunks = draw(st.integers(2, 4)), draw(st.sampled_from([1, 1, 1, 2]))
    forward_only = draw(st.sampled_from([False, False, True]))
    rows = draw(st.integers(1, 9))
    problem = random_problem(rows, stages, chunks=chunks, forward_only=forward_only, seed=draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["1f1b", "gpipe", "deep", "listed"]))
    if kind == "listed":
        depth = tuple(draw(st.integers(1, 9)) for _ in range(stages))
        order = list_schedule(problem, Policy(depth, draw(st.sampled_from(list(Rule)))))
        if order is not None:
            return problem, order
    if kind == "deep" and chunks == 1 and not forward_only:
        return problem, ahead(problem, draw(st.integers(0, 8)))
    return problem, SCHEDULES["gpipe" if kind == "gpipe" else "1f1b"](problem)


@st.composite
def any_orders(draw):
    problem, order = draw(orders())
    return problem, divided(order, draw(st.integers(0, 99))) if draw(st.booleans()) else order


@given(any_orders(), st.sampled_from(RULES))
def test_simulation_and_lists_take_the_same_time_and_stall_together(case, rules):
    problem, order = case
    problem = replace(problem, transfers=rules)
    lists = lists_of(problem, order, rules)
    about = {
        "micro_batches": problem.micro_batches,
        "chunks": problem.chunks,
        "forward_only": problem.forward_only,
        "ordered_starts": rules.ordered_starts,
    }
    try:
        events = run_lists(problem, lists, ordered_starts=rules.ordered_starts)
    except ListsStallError:
        with pytest.raises(StallError, match="stalls where starts of transfers wait"):
            simulate(problem, order)
        with pytest.raises(PlanError, match=r"the plan stalls: stage . at .* waits for stage"):
            verify_lists(lists, **about)
        assert fast_verify(Dimensions(stages=problem.stages, **about), lists) is None
        assert rules.ordered_starts, "starts that hold up nobody cannot stall what runs in this order"
        return
    verify_lists(lists, **about)
    assert fast_verify(Dimensions(stages=problem.stages, **about), lists) is not None
    if not rules.are_plain:  # the default rules take receives to be posted as early as anything is sent
        run, plain = (simulate(replace(problem, transfers=each), order) for each in (rules, TransferRules()))
        assert [[(e.instruction, e.start_ns, e.end_ns) for e in rank] for rank in run.timeline] == events
        assert run.peak_bytes == plain.peak_bytes


def test_the_two_stage_example_stalls():
    """Stage 0 runs six forwards ahead; stage 1 at SEND_B2 waits for RECV_B1, which lies behind stage 0's SEND_F5."""
    problem = random_problem(8, 2)
    order = ahead(problem, 4)
    lists = lists_of(problem, order, CUDA_RULES)
    verify_lists(lists, micro_batches=8)
    with pytest.raises(PlanError, match=r"stage 0 at .*SEND_F\d.* waits for stage 1 to reach .*RECV_F") as stalled:
        verify_lists(lists, micro_batches=8, ordered_starts=True)
    assert "stage 1 at" in stalled.value.message and "SEND_B" in stalled.value.message
    with pytest.raises(StallError, match="stages wait for one another to receive") as refused:
        simulate(replace(problem, transfers=CUDA_RULES), order)
    assert "fewer forwards ahead" in refused.value.hint


@given(st.integers(1, 12), st.integers(2, 8), st.integers(0, 99), st.sampled_from([False, True]))
def test_plain_1f1b_never_stalls(rows, stages, seed, forward_only):
    """So a search that begins with it finds a plan."""
    problem = random_problem(rows, stages, seed=seed, forward_only=forward_only)
    simulate(replace(problem, transfers=CUDA_RULES), SCHEDULES["1f1b"](problem))


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_no_more_passes_than_asked_for_run_while_a_receive_is_pending(most):
    problem = random_problem(7, 3)
    for instructions in lists_of(problem, ahead(problem, 1), TransferRules(receive_ahead=most)):
        pending, seen = {}, []
        for instruction in instructions:
            if isinstance(instruction, RecvStart):
                pending[instruction.payload] = 0
            elif isinstance(instruction, RecvWait):
                seen.append(pending.pop(instruction.payload))
            elif isinstance(instruction, Forward | Backward):
                pending = {payload: passes + 1 for payload, passes in pending.items()}
        assert not pending and max(seen) <= most
        assert most == 0 or max(seen) >= 1


PLANS = [(ModelFamily.GPT, {}), (ModelFamily.T5, {"pipeline_parallel": 4}), (ModelFamily.GPT, {"chunks": 2})]


@pytest.mark.parametrize(("family", "layout"), PLANS)
def test_the_planner_plans_under_its_rules(family, layout):
    free, ruled = planner(family, **layout), planner(family, **layout, transfers=CUDA_RULES)
    given_batch = batch(family, 60)
    plan = ruled.plan(given_batch, 0)
    verify(plan, ordered_starts=True)
    assert plan.totals.predicted_ns >= free.plan(given_batch, 0).totals.predicted_ns * 0.98
    assert digest(plan) == digest(ruled.plan(given_batch, 0))
    assert ruled.digest != free.digest
    evaluation = ruled.plan(given_batch, 0, forward_only=True)
    verify(evaluation, ordered_starts=True)


def test_interleaved_orders_that_stall_receive_earlier():
    """Nine micro-batches on two ranks of two chunks: groups are larger than the pipeline."""
    ruled = planner(ModelFamily.GPT, chunks=2, transfers=CUDA_RULES, memory_limit_bytes=150_000_000)
    plans = [ruled.plan(batch(ModelFamily.GPT, samples, seed=samples), 0) for samples in (5, 20, 90)]
    for plan in plans:
        verify(plan, ordered_starts=True)
    assert [rules.receive_ahead for rules in CUDA_RULES.relaxed()] == [1, 2, None]
    assert all(rules.ordered_starts for rules in CUDA_RULES.relaxed()) and not [*GLOO_RULES.relaxed()]


def test_a_planner_takes_the_rules_of_a_device_unless_it_has_its_own() -> None:
    """Tensor-parallel size 1 and Blackwell have 32 hardware queues, in which no start waits for another stream's."""
    for queues, rules in ((None, CUDA_RULES), ("1", CUDA_RULES), ("8", CUDA_RULES), ("32", MANY_QUEUES_RULES)):
        assert cuda_rules({} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": queues}) == rules
    assert GLOO_RULES.are_plain and not CUDA_RULES.are_plain
    plain = planner(ModelFamily.GPT)
    assert plain.under(GLOO_RULES) is plain
    ruled = plain.under(CUDA_RULES)
    assert ruled.settings.transfers == CUDA_RULES and ruled.tables is plain.tables
    own = planner(ModelFamily.GPT, transfers=TransferRules(receive_ahead=3))
    assert own.under(CUDA_RULES) is own
    with pytest.raises(msgspec.ValidationError, match="receive_ahead"):
        msgspec.convert({"receive_ahead": -1}, TransferRules)
